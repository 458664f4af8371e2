"""RequestGroup: what a caller asked for, followed until its last answer ends."""

import time
from collections.abc import Callable
from typing import Literal

from mlx_paged_attention.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from mlx_paged_attention.engine.sequence import Sequence
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.step_plan import PlannedRow, RowOutput

OutputKind = Literal["cumulative", "delta", "final"]
Emit = Callable[[RequestOutput | Exception], None]


class RequestGroup:
    """The sequences of one request and where their outputs go.

    Args:
        kind: ``"delta"`` reports what is new after each step, ``"cumulative"`` everything so
            far, ``"final"`` only the end.
        emit: called on the engine's thread with each output, or with the error that ended
            the request.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        sequences: list[Sequence],
        *,
        kind: OutputKind,
        arrival_time: float,
        emit: Emit,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.sequences = sequences
        self.emit = emit
        self.first_token_time: float | None = None
        self.first_scheduled_time: float | None = None
        self.finished_time: float | None = None
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._arrival_time = arrival_time
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_token_ids)
        # Which of best_of answers are returned is known only when all have ended.
        self._kind = "final" if params.num_sequences > params.n else kind

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def take(self, sequence: Sequence, row: PlannedRow, output: RowOutput, token_ids: list[int]) -> None:
        """What a step has computed for a sequence: tokens, and log-probabilities of the prompt."""
        if output.prompt_logprobs is not None:
            assert self._prompt_logprobs is not None
            entries = [sequence.public_logprobs(entry) for entry in output.prompt_logprobs]
            first = row.start + 1
            self._prompt_logprobs[first : first + len(entries)] = entries
        if token_ids and self.first_token_time is None:
            self.first_token_time = time.monotonic()
        sequence.append(token_ids, output.logprobs, sequence.request.stop_reason)

    def output(self) -> RequestOutput | None:
        """What to report after a step; ``None`` if there is nothing to say."""
        finished = self.finished
        if self._kind == "final" and not finished:
            return None
        if not any(sequence.has_news for sequence in self.sequences):
            return None
        outputs: list[CompletionOutput]
        if self._kind == "delta":
            outputs = [s.output(delta=True) for s in self.sequences if s.has_news]
        else:
            outputs = [s.output(delta=False) for s in self._best()]
        return self._request_output(outputs, finished=finished)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt."""
        return self.sequences[0].request.num_cached_tokens

    def _request_output(self, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                first_scheduled_time=self.first_scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_preemptions=sum(s.request.num_preemptions for s in self.sequences),
            ),
            finished=finished,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _best(self) -> list[Sequence]:
        """The ``n`` most likely of ``best_of`` sequences, most likely first; else all, in order."""
        if len(self.sequences) == self.params.n:
            return self.sequences
        ranked = sorted(self.sequences, key=lambda s: s.cumulative_logprob, reverse=True)
        best = ranked[: self.params.n]
        for index, sequence in enumerate(best):
            sequence.index = index
        return best
