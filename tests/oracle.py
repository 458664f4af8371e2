"""The reference for every parity test: mlx-lm alone, one sequence, a fresh plain cache.

The model's module is executed afresh, apart from ``sys.modules``, so that whatever the engine
rebinds in mlx-lm's modules cannot reach the reference.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_paged_attention.sampling.params import SamplingParams

LOGPROB_TOLERANCE = 1e-4


def varied_prompt(length: int, seed: int) -> list[int]:
    """A prompt of ``length`` token ids from 3 to 252 that differ between positions and seeds."""
    return [(7 * i + 13 * seed + i * i) % 250 + 3 for i in range(length)]


def greedy(num_tokens: int, **others: Any) -> SamplingParams:
    """What the oracle does, said to the engine; the five best log-probabilities come along."""
    return SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, "logprobs": 5, **others})


@dataclass(frozen=True)
class Reference:
    """A greedy continuation.

    Attributes:
        token_ids: the chosen tokens.
        logprobs: ``[outputs, vocab]`` float32, the distribution each of them was chosen from.
    """

    token_ids: list[int]
    logprobs: np.ndarray


class Oracle:
    """mlx-lm's greedy generation of one model; results are kept, since tests ask again and again."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._greedy: dict[tuple[int, ...], Reference] = {}

    @classmethod
    def load(cls, directory: Path) -> "Oracle":
        """The oracle of an MLX model directory."""
        model, _ = load_model(directory, get_model_classes=_private_model_classes)
        return cls(model)

    @classmethod
    def with_weights_of(cls, model: Any, config: dict[str, Any]) -> "Oracle":
        """The oracle of a model that is already loaded; the arrays are shared, the code is not."""
        model_class, args_class = _private_model_classes(config)
        own = model_class(args_class.from_dict(config))
        weights = dict(tree_flatten(model.parameters()))
        if hasattr(own, "sanitize"):
            own.sanitize(dict(weights))  # where Gemma 3 learns that its head is its embedding
        own.load_weights(list(weights.items()))  # strict: nothing stays random
        return cls(own)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        """Prefill the whole prompt in one forward, then decode one token at a time."""
        key = tuple(prompt)
        known = self._greedy.get(key)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._greedy[key] = self._generate(prompt, num_tokens)
        return Reference(known.token_ids[:num_tokens], known.logprobs[:num_tokens])

    def prompt_logprobs(self, prompt: Sequence[int]) -> np.ndarray:
        """``[len(prompt), vocab]``: row ``i`` is the distribution of the token after position ``i``."""
        return _log_softmax(self.model(mx.array([prompt]), cache=make_prompt_cache(self.model))[0])

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        cache = make_prompt_cache(self.model)
        token_ids: list[int] = []
        rows = []
        tokens = list(prompt)
        for _ in range(num_tokens):
            row = _log_softmax(self.model(mx.array([tokens]), cache=cache)[0, -1])
            rows.append(row)
            tokens = [int(row.argmax())]
            token_ids += tokens
        return Reference(token_ids, np.stack(rows))


def assert_matches(output: Any, reference: Reference, tolerance: float = LOGPROB_TOLERANCE) -> None:
    """A ``CompletionOutput`` equals the reference, tokens and (where it has them) log-probabilities.

    Tokens may part only where the reference's two best are closer than ``tolerance``: there fp32
    rounding decides, and what follows is another text, so the comparison ends.
    """
    assert len(output.token_ids) == len(reference.token_ids), (output.token_ids, reference.token_ids)
    for i, (token, expected) in enumerate(zip(output.token_ids, reference.token_ids, strict=True)):
        row = reference.logprobs[i]
        if token != expected:
            gap = float(row[expected] - row[token])
            assert gap <= tolerance, (
                f"token {i} is {token}, the reference has {expected}, better by {gap:.2e}: "
                f"{output.token_ids} != {reference.token_ids}"
            )
            print(f"token {i}: {token} and {expected} tie within {gap:.2e}; compared up to here")
            return
        if output.logprobs is not None:
            for token_id, entry in output.logprobs[i].items():
                delta = abs(entry.logprob - float(row[token_id]))
                assert delta <= tolerance, f"logprob of token {token_id} at output {i} is off by {delta:.2e}"


def _private_model_classes(config: dict[str, Any]) -> tuple[type, type]:
    module = _private_copy(config["model_type"])
    if hasattr(module, "scaled_dot_product_attention"):
        module.scaled_dot_product_attention = _private_copy("base").scaled_dot_product_attention
    return module.Model, module.ModelArgs


def _private_copy(name: str) -> ModuleType:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _log_softmax(logits: mx.array) -> np.ndarray:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
