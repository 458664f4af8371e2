"""BeamGroup: a request whose answers are the likeliest that beam search finds."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_paged_attention.engine.group import Emit, RequestGroup
from mlx_paged_attention.engine.outputs import CompletionOutput, RequestOutput
from mlx_paged_attention.engine.sequence import Sequence
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import RowOutput
from mlx_paged_attention.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer, whole or in the making.

    Attributes:
        token_ids: without the prompt; a token that ended it is the last.
        logprob: of all of them.
        reason: why it ended; ``None`` while it goes on.
        stop_reason: the stop token id that ended it, if it was not the model's own.
    """

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    reason: str | None = None
    stop_reason: int | None = None

    def then(self, token_id: int, logprob: float) -> "Hypothesis":
        return replace(self, token_ids=(*self.token_ids, token_id), logprob=self.logprob + logprob)

    def score(self, length_penalty: float) -> float:
        """Log-probability over length to the power of the penalty; what ended it does not count."""
        length = len(self.token_ids) - (self.reason == "stop")
        return self.logprob / float(max(1, length) ** length_penalty)


@dataclass(slots=True)
class Beam:
    """A hypothesis that goes on, and the request that computes it.

    Attributes:
        candidates: token ids and log-probabilities that may come next, once they are known.
    """

    hypothesis: Hypothesis
    sequence: Sequence
    candidates: list[tuple[int, float]] | None = None


class BeamGroup(RequestGroup):
    """Beam search of width ``params.num_sequences``; its ``params.n`` best answers come once, at the end.

    Each beam is a request of the scheduler that shares the blocks of what it has in common with others. In
    every round all beams compute one token; the likeliest continuations of all of them are the next beams.
    Those that end, at one of ``end_ids``, compete by their score. Source: Graves 2012,
    https://arxiv.org/abs/1211.3711; the length penalty is that of Wu et al. 2016, section 7, without its
    constant: https://arxiv.org/abs/1609.08144.

    Args:
        root: the request of the prompt.
        end_ids: token ids that end an answer, and what each is reported as.
        max_tokens: most tokens of an answer.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        root: Request,
        tokenizer: Tokenizer | None,
        *,
        end_ids: dict[int, int | None],
        max_tokens: int,
        arrival_time: float,
        emit: Emit,
    ) -> None:
        super().__init__(
            request_id,
            prompt,
            prompt_token_ids,
            params,
            [Sequence(0, root, replace(params, detokenize=False), None)],
            kind="final",
            arrival_time=arrival_time,
            emit=emit,
        )
        self._root = root
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._width = params.num_sequences
        self._ended: list[Hypothesis] = []
        self._done = False
        self._names = 1
        self.beams = [Beam(Hypothesis(), self.sequences[0])]

    @property
    def finished(self) -> bool:
        return self._done or super().finished

    @property
    def num_cached_tokens(self) -> int:
        return self._root.num_cached_tokens

    def offer(self, request: Request, row: RowOutput) -> None:
        """What may come next in one beam."""
        assert row.logprobs is not None, "a beam's row came without log-probabilities"
        beam = next(beam for beam in self.beams if beam.sequence.request is request)
        beam.candidates = row.logprobs[-1].top

    @property
    def round_is_over(self) -> bool:
        """Every beam knows what may come next."""
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> dict[str, list[Hypothesis]]:
        """End a round: what goes on from each beam, by request id; nothing at all when the search is over."""
        best: list[tuple[float, Beam, tuple[int, float]]] = []
        for beam in self.beams:
            assert beam.candidates is not None
            for token_id, logprob in beam.candidates:
                if token_id in self._end_ids:
                    ended = beam.hypothesis.then(token_id, logprob)
                    stop_reason = self._end_ids[token_id]
                    self._ended.append(replace(ended, reason="stop", stop_reason=stop_reason))
                else:
                    best.append((beam.hypothesis.logprob + logprob, beam, (token_id, logprob)))
        best.sort(key=lambda entry: entry[0], reverse=True)
        # Only of those that go on: a hypothesis has all its tokens.
        going = [(beam.hypothesis.then(*next_one), beam) for _, beam, next_one in best[: self._width]]
        if going and len(going[0][0].token_ids) >= self._max_tokens:
            self._ended += [replace(hypothesis, reason="length") for hypothesis, _ in going]
            going = []
        self._ended.sort(key=self._score, reverse=True)
        del self._ended[self._width :]
        if not going or self._none_can_win(going[0][0]):
            self._done = True
            return {}
        children: dict[str, list[Hypothesis]] = {beam.sequence.request.request_id: [] for beam in self.beams}
        for hypothesis, beam in going:
            children[beam.sequence.request.request_id].append(hypothesis)
        return children

    def new_name(self, is_taken: Callable[[str], bool]) -> str:
        """For the request of another beam."""
        while True:
            name = f"{self.request_id}#{self._names}"
            self._names += 1
            if not is_taken(name):
                return name

    def begin_round(self, beams: list[Beam]) -> None:
        self.beams = beams
        self.sequences = [beam.sequence for beam in beams]

    def output(self) -> RequestOutput | None:
        if not self.finished:
            return None
        answers = self._ended
        if not self._done:  # aborted
            going = [replace(beam.hypothesis, reason="abort") for beam in self.beams]
            answers = sorted([*answers, *going], key=self._score, reverse=True)
        outputs = [self._answer(i, answer) for i, answer in enumerate(answers[: self.params.n])]
        return self._request_output(outputs, finished=True)

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.score(self.params.length_penalty)

    def _none_can_win(self, best: Hypothesis) -> bool:
        """Whether enough answers have ended, and none that goes on is likely to be better."""
        if len(self._ended) < self._width or self.params.early_stopping == "never":
            return False
        return self.params.early_stopping is True or self._score(best) <= self._score(self._ended[-1])

    def _answer(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        sequence = Sequence(index, self._root, self.params, self._tokenizer)
        sequence.append(list(hypothesis.token_ids), None, hypothesis.stop_reason)
        assert hypothesis.reason is not None
        sequence.finish(hypothesis.reason, hypothesis.stop_reason)
        return replace(sequence.output(delta=False), cumulative_logprob=hypothesis.logprob)


def next_round(
    group: BeamGroup,
    scheduler: Scheduler,
    make_request: Callable[[str, list[int], SamplingParams, int, float], Request],
) -> tuple[list[Sequence], list[Sequence]]:
    """The requests of beams that lead nowhere end, others part where several lead on from one.

    Args:
        make_request: of a beam's name, tokens, parameters, tokens to come at most, and time of arrival.

    Returns:
        The sequences that are not served any more, and those that are from now on.
    """
    children = group.advance()
    given_up = [b.sequence for b in group.beams if not children.get(b.sequence.request.request_id)]
    scheduler.abort([sequence.request.request_id for sequence in given_up])
    beams, begun = [], []
    for beam in group.beams:
        parent = beam.sequence.request
        known = parent.num_tokens
        going = children.get(parent.request_id, [])
        for hypothesis in going[1:]:
            tokens = [*parent.token_ids, hypothesis.token_ids[-1]]
            left = parent.max_tokens - (len(tokens) - parent.num_prompt_tokens)
            name = group.new_name(scheduler.is_alive)
            child = make_request(name, tokens, group.params, max(1, left), parent.arrival_time)
            scheduler.fork(parent, child, known)
            sequence = Sequence(0, child, replace(group.params, detokenize=False), None)
            begun.append(sequence)
            beams.append(Beam(hypothesis, sequence))
        if going:
            scheduler.continue_with(parent, going[0].token_ids[-1])
            beams.append(Beam(going[0], beam.sequence))
    if beams:
        group.begin_round(beams)
    return given_up, begun
