"""RequestBuilder: from what a caller hands in to a group that the engine can queue."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import msgspec

from mlx_paged_attention.cache.block_hash import BlockHasher
from mlx_paged_attention.engine.beams import BeamGroup
from mlx_paged_attention.engine.group import Emit, OutputKind, RequestGroup
from mlx_paged_attention.engine.outputs import EngineInfo
from mlx_paged_attention.engine.prompt import (
    check_token_ids,
    continue_grammar,
    row_sampling,
    row_thinking,
    tokenize,
)
from mlx_paged_attention.engine.sequence import Sequence
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import RowSampling, RowThinking, SamplingParams
from mlx_paged_attention.scheduler.queue import Policy
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.text.tokenizer import Tokenizer


class RequestBuilder:
    """Checks what callers ask for and makes requests of it. Any thread may use it.

    Args:
        tokenizer: ``None`` for token ids only.
        policy: the scheduler's.
        check_fits: raises ``RequestTooLongError`` for what could never be served.
        hasher: of the prefix cache; ``None`` without one.
        seed: from which the seeds of requests that have none are drawn.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        *,
        policy: Policy,
        check_fits: Callable[[Request], None],
        hasher: BlockHasher | None,
        seed: int | None,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._policy = policy
        self._check_fits = check_fits
        self._hasher = hasher
        self._seeds = random.Random(seed)

    def build(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        kind: OutputKind,
        emit: Emit,
    ) -> RequestGroup:
        """A group that is ready to be queued.

        Raises:
            InvalidRequestError, RequestTooLongError: it cannot be served; the message says why.
        """
        if kind not in get_args(OutputKind):
            raise InvalidRequestError(
                f"output_kind must be one of {', '.join(get_args(OutputKind))}, not {kind!r}", "output_kind"
            )
        arrival = time.monotonic()
        text, token_ids = tokenize(prompt, self._tokenizer)
        check_token_ids(token_ids, params, self._info.vocab_size)
        if params.priority and self._policy != "priority":
            raise InvalidRequestError(
                f"priority is {params.priority}, but scheduling_policy is {self._policy!r}; leave "
                "it out, or start the engine with scheduling_policy (--scheduling-policy) 'priority'",
                "priority",
            )
        max_tokens = params.max_tokens or max(1, self._info.longest_sequence - len(token_ids))
        if params.use_beam_search:
            return self._beams(request_id, text, token_ids, params, max_tokens, arrival, emit)
        thinking = row_thinking(params, self._tokenizer, token_ids, [])
        sequences: list[Sequence] = []
        for index in range(params.num_sequences):
            name = request_id if params.num_sequences == 1 else f"{request_id}#{index}"
            first = sequences[0].request.sampling if sequences else None
            request = self._request(
                name, token_ids, params, index, max_tokens, arrival, thinking=thinking, first=first
            )
            self._check_fits(request)
            if self._hasher is not None:
                # Here, on the caller's thread, and once for all answers: a long prompt takes a while.
                known = sequences[0].request.block_hashes if sequences else ()
                request.start_hashing(self._hasher, known)
            sequences.append(Sequence(index, request, params, self._tokenizer))
        return RequestGroup(
            request_id, text, token_ids, params, sequences, kind=kind, arrival_time=arrival, emit=emit
        )

    def build_fork(
        self,
        group: RequestGroup | None,
        parent_id: str,
        request_id: str,
        params: SamplingParams | None,
        *,
        index: int,
        kind: OutputKind,
        emit: Emit,
    ) -> tuple[RequestGroup, Request | None]:
        """A group whose prompt is all that an answer of another group has said so far.

        Args:
            group: the other; ``None`` if there is none of the id ``parent_id``.
            params: ``None`` is the other's.

        Returns:
            It, and the request whose blocks it shares; ``None`` if it cannot share any.

        Raises:
            InvalidRequestError, RequestTooLongError: as ``build``; or there is nothing to fork.
        """
        if group is None or isinstance(group, BeamGroup):
            what = "is a beam search" if group else "is not being served"
            raise InvalidRequestError(f"request {parent_id!r} cannot be forked: it {what}", "request_id")
        parent = next((s.request for s in group.sequences if s.index == index), None)
        if parent is None or parent.is_finished:
            raise InvalidRequestError(f"request {parent_id!r} has no running answer {index} to fork", "index")
        params = group.params if params is None else params
        if params.cache_salt not in (None, parent.cache_salt):
            raise InvalidRequestError(
                "a fork shares blocks with its parent, so that it has the same cache_salt", "cache_salt"
            )
        params = replace(params, cache_salt=parent.cache_salt)
        # What scores its prompt cannot share it.
        shares = params.prompt_logprobs is None and not params.use_beam_search
        fork = self.build(request_id, list(parent.token_ids), params, kind=kind, emit=emit)
        thinking = row_thinking(params, self._tokenizer, parent.prompt_token_ids, parent.output_token_ids)
        for sequence in fork.sequences:
            continue_grammar(sequence.request, parent)
            sampling = sequence.request.sampling
            sequence.request.sampling = msgspec.structs.replace(sampling, thinking=thinking)
        return fork, parent if shares else None

    def beam(
        self, name: str, token_ids: list[int], params: SamplingParams, max_tokens: int, arrival: float
    ) -> Request:
        """A beam's request.

        It reports twice as many candidates as there are beams: enough, though half of them may end.
        """
        return self._request(
            name,
            token_ids,
            replace(params, seed=0),  # nothing is drawn
            0,
            max_tokens,
            arrival,
            candidates=min(2 * params.num_sequences, self._info.vocab_size),
        )

    def _beams(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        arrival: float,
        emit: Emit,
    ) -> BeamGroup:
        width = params.num_sequences
        if width > self._info.max_num_seqs:
            raise InvalidRequestError(
                f"beam search of width {width} runs as many sequences at once, and max_num_seqs is "
                f"{self._info.max_num_seqs}: lower n or best_of, or raise it",
                "best_of" if params.best_of else "n",
            )
        root = self.beam(f"{request_id}#0", token_ids, params, max_tokens, arrival)
        self._check_fits(root)
        if self._hasher is not None:
            root.start_hashing(self._hasher)
        ends: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(self._info.eos_token_ids)
        for token_id in params.stop_token_ids or ():
            ends.setdefault(token_id, token_id)
        return BeamGroup(
            request_id,
            text,
            token_ids,
            params,
            root,
            self._tokenizer,
            end_ids=ends,
            max_tokens=min(max_tokens, self._info.max_model_len - len(token_ids)),
            arrival_time=arrival,
            emit=emit,
        )

    def _request(
        self,
        name: str,
        token_ids: list[int],
        params: SamplingParams,
        index: int,
        max_tokens: int,
        arrival: float,
        *,
        candidates: int | None = None,
        thinking: RowThinking | None = None,
        first: RowSampling | None = None,
    ) -> Request:
        """The scheduler's request for answer ``index``; or one that reports candidates and is steered."""
        sampling = row_sampling(params, self._info, self._tokenizer, index, self._seeds, thinking, first)
        if candidates is not None:
            sampling = msgspec.structs.replace(sampling, logprobs=candidates)
        return Request(
            name,
            token_ids,
            sampling,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=self._info.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            ignore_eos=params.ignore_eos,
            priority=params.priority,
            arrival_time=arrival,
            cache_salt=params.cache_salt,
            is_steered=candidates is not None,
        )
