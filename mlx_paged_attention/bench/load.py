"""Load: what the contestants are given, the same for all of them."""

import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """Requests that are put at once; every one is answered with exactly ``output_len`` tokens, greedily.

    Attributes:
        prompts: token ids of each request.
    """

    prompts: list[list[int]]
    output_len: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.output_len


class Prompts:
    """Random token ids that depend on a seed and on what they are for, and on nothing else.

    Args:
        vocab_size: ids are below it.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def draw(self, purpose: str, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of exactly ``length`` tokens; another purpose gives other ones."""
        generator = np.random.default_rng([self._seed, zlib.crc32(purpose.encode())])
        tokens: list[list[int]] = generator.integers(0, self._vocab_size, (count, length)).tolist()
        return tokens
