"""SamplingRow: what the sampler must remember about one request from step to step."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mlx_paged_attention.sampling.grammar import RowGrammar
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.sampling.thinking_budget import ThinkingBudget

# Below this a temperature is greedy: dividing by it leaves the sampling distribution to rounding.
MIN_TEMPERATURE = 1e-5

IntArray = npt.NDArray[np.int32]


class SamplingRow:
    """One request's sampling parameters and the tokens it has so far.

    Token ids are trusted: the engine refuses ids outside the vocabulary when the request arrives.

    Args:
        token_ids: every token known: the prompt and, after a preemption, the output.
        num_prompt_tokens: how many of them are prompt; the rest counts as output.
        sampling: how the row's logits become tokens.
        matcher: at the start of ``sampling.grammar``, if there is one.

    Attributes:
        output_token_ids: the output so far.
        num_outputs: tokens sampled, one that is on its way included: the index of the next random number.
        penalized: the tokens that penalties look at, or ``None`` when the row has no penalty.
        grammar: where the output stands in its grammar, or ``None``.
        budget: how much its reasoning may yet take, or ``None``.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: RowSampling,
        matcher: LLMatcher | None = None,
    ) -> None:
        assert 0 <= num_prompt_tokens <= len(token_ids), (num_prompt_tokens, len(token_ids))
        self.sampling = sampling
        self.output_token_ids = list(token_ids[num_prompt_tokens:])
        self.num_outputs = len(self.output_token_ids)
        self.penalized: TokenCounts | None = None
        repeats = sampling.repetition_penalty != 1.0
        if repeats or sampling.presence_penalty or sampling.frequency_penalty:
            # Only the repetition penalty looks at the prompt.
            prompt = token_ids[:num_prompt_tokens] if repeats else ()
            self.penalized = TokenCounts(prompt, self.output_token_ids)
        self.bias_ids = np.array(list(sampling.logit_bias.keys()), dtype=np.int32)
        self.bias_values = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self.allowed_ids = (
            None if sampling.allowed_token_ids is None else np.unique(_ids(sampling.allowed_token_ids))
        )
        assert (matcher is None) == (sampling.grammar is None), sampling.grammar
        self.grammar: RowGrammar | None = None
        if matcher is not None:
            read = token_ids[num_prompt_tokens - sampling.num_grammar_tokens :]
            self.grammar = RowGrammar(matcher, read, sampling.stop_ids)
        self.budget: ThinkingBudget | None = None
        if sampling.thinking is not None:
            self.budget = ThinkingBudget(sampling.thinking, self.output_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: temperature 0, or too small to tell from it."""
        return self.sampling.temperature < MIN_TEMPERATURE

    def expect(self) -> None:
        """Count a token that is on its way; the next may be sampled if ``sampling.runs_ahead``."""
        self.num_outputs += 1

    def append(self, token_id: int) -> None:
        """Record the next token, expected or not."""
        self.output_token_ids.append(token_id)
        self.num_outputs = max(self.num_outputs, len(self.output_token_ids))
        if self.penalized is not None:
            self.penalized.add(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.budget is not None:
            self.budget.advance(token_id)

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, or ``None``."""
        return None if self.budget is None else self.budget.forced_id

    def banned_ids(self) -> list[int]:
        """Ids that must not come next: stops before ``min_tokens``, and last tokens of bad words.

        A bad word is looked for in the output alone, so that a prompt may quote its beginning.
        """
        sampling, output = self.sampling, self.output_token_ids
        banned = list(sampling.stop_ids) if self.num_outputs < sampling.min_tokens else []
        for word in sampling.bad_words:
            begun = len(word) - 1
            if begun <= len(output) and output[len(output) - begun :] == word[:-1]:
                banned.append(word[-1])
        return banned


class TokenCounts:
    """How often each token occurs in the output, as arrays that grow by one token at a time."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        unique = np.unique(_ids(prompt))
        self._size = len(unique)
        self._ids = np.resize(unique, self._size + 64) if self._size else np.zeros(64, np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        self._places = {int(token): place for place, token in enumerate(unique)}
        for token_id in output:
            self.add(token_id)

    @property
    def ids(self) -> IntArray:
        """Distinct tokens of prompt and output, ``[tokens]``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> IntArray:
        """Occurrences in the output, 0 for a token of the prompt alone, ``[tokens]``."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one output token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1


def _ids(token_ids: Iterable[int]) -> IntArray:
    return np.array(list(token_ids), dtype=np.int32)
