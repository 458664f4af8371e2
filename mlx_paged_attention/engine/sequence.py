"""Sequence: one answer in the making, its tokens, text and log-probabilities."""

from mlx_paged_attention.engine.outputs import CompletionOutput, Logprob
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.step_plan import TokenLogprobs
from mlx_paged_attention.text.detokenizer import Detokenizer
from mlx_paged_attention.text.tokenizer import Tokenizer


class Sequence:
    """Follows one scheduler request and turns its tokens into what a caller sees."""

    def __init__(
        self, index: int, request: Request, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cumulative_logprob = 0.0
        self._shows_stop = params.include_stop_str_in_output
        self._keeps_logprobs = params.logprobs is not None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_ids=params.shown_special_ids,
                min_tokens=params.min_tokens,
            )
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._reported_tokens = 0
        self._reported_texts = 0
        self._reported_end = False

    @property
    def stopped_by_text(self) -> bool:
        """A stop string has been met; the scheduler does not know yet."""
        return self._detokenizer is not None and self._detokenizer.stopped is not None

    @property
    def has_news(self) -> bool:
        """Something was added since the last delta."""
        return (
            len(self._token_ids) > self._reported_tokens
            or len(self._text) > self._reported_texts
            or (self.finish_reason is not None and not self._reported_end)
        )

    def append(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        stop_reason: str | int | None = None,
    ) -> None:
        """Take new tokens; those after a stop string are dropped.

        Args:
            stop_reason: the last of them, if it is a stop token that ends the answer: it has no text then.
        """
        silent = isinstance(stop_reason, int) and not self._shows_stop
        for i, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            if logprobs is not None:
                self.cumulative_logprob += logprobs[i].logprob
                if self._keeps_logprobs:
                    self._logprobs.append(self.public_logprobs(logprobs[i]))
            if self._detokenizer is not None and not (silent and i == len(token_ids) - 1):
                self._text.append(self._detokenizer.push(token_id))
                if self._detokenizer.stopped is not None:
                    return

    def finish(self, reason: str, stop_reason: str | int | None) -> None:
        """End the answer; text that was held back comes out."""
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.flush())
            if self._detokenizer.stopped is not None:
                reason, stop_reason = "stop", self._detokenizer.stopped
        self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self, *, delta: bool) -> CompletionOutput:
        """The answer so far, or what is new since the last delta."""
        first_token = self._reported_tokens if delta else 0
        first_text = self._reported_texts if delta else 0
        self._reported_tokens, self._reported_texts = len(self._token_ids), len(self._text)
        self._reported_end = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[first_text:]),
            token_ids=self._token_ids[first_token:],
            logprobs=self._logprobs[first_token:] if self._keeps_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if self._keeps_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def public_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token that stands at a position, then the alternatives, by id."""
        result = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for i, (token_id, logprob) in enumerate(entry.top):
            result.setdefault(token_id, Logprob(logprob, i + 1, self._token_text(token_id)))
        return result

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)
