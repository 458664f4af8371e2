"""Engine: requests in, one step at a time, outputs out."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import msgspec

from mlx_paged_attention.cache.block_hash import root_hash
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.cache.use_window import UseWindow
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.beams import Beam, BeamGroup
from mlx_paged_attention.engine.blocks_view import BlocksView, view_blocks
from mlx_paged_attention.engine.group import OutputKind, RequestGroup
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats, RequestOutput
from mlx_paged_attention.engine.prompt import check_token_ids, row_sampling, tokenize
from mlx_paged_attention.engine.sequence import Sequence, public_logprobs
from mlx_paged_attention.errors import (
    EngineBusyError,
    InvalidRequestError,
    PoolMemoryError,
    RequestFailedError,
)
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import PlannedRow, RowOutput, StepOutput, StepPlan
from mlx_paged_attention.text.tokenizer import Tokenizer

Emit = Callable[[RequestOutput | Exception], None]

logger = logging.getLogger(__name__)

_NO_MEMORY = (
    "there is no memory to compute even one token of it. Close other programs, or load the model with a "
    "smaller pool (kv_memory) or a smaller model"
)

# This many steps in a row that raise mean that the fault is not in a request.
MAX_FAILED_STEPS = 3
# After the machine had no memory for the pool to grow, it is asked again only after so many seconds.
GROWTH_PAUSE = 5.0


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def read(self) -> StepOutput:
        """Wait for it."""
        ...


class Runner(Protocol):
    """What computes the steps, in the order in which they are launched.

    Attributes:
        runs_ahead: steps may be launched while the one before is being computed.
    """

    @property
    def runs_ahead(self) -> bool: ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Like ``read``, it raises ``MemoryError`` if there is no memory for it."""
        ...


class Engine:
    """Owns scheduler and runner. ``prepare`` may be called from any thread, all else from one.

    Args:
        fingerprint: of the weights' content; part of every block hash.
        tokenizer: ``None`` serves token ids only.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        runner: Runner,
        fingerprint: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        if tokenizer is not None:
            # Chat models often name the end of a turn there, and the end of a document in the configuration.
            ends = dict.fromkeys([*info.eos_token_ids, *tokenizer.eos_token_ids])
            info = replace(info, eos_token_ids=list(ends))
        self.info = info
        self._runner = runner
        self._tokenizer = tokenizer
        self._cache = KVCacheManager(
            info.start_blocks or info.num_blocks,
            info.block_size,
            max_blocks=info.num_blocks,
            enable_caching=config.enable_prefix_caching,
            root_hash=root_hash(fingerprint),
            partial_hits=True,
            fold_duplicates=True,
            windows=info.windows,
            max_step_tokens=info.max_num_batched_tokens,
            states=StateSlots(info.num_states, info.block_size) if info.num_states else None,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            policy=config.scheduling_policy,
            max_overtaken_seconds=config.max_overtaken_seconds,
        )
        self._seeds = random.Random(config.seed)
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[str, tuple[RequestGroup, Sequence]] = {}
        self._failed_steps = 0
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._least_blocks = self._pool_blocks = self._cache.num_blocks
        self._growths = self._shrinks = 0
        self._refusals = 0
        self._refusal = ""  # the last one's message
        self._grow_again = 0.0
        self._asleep = False
        self._window: UseWindow | None = None
        if info.start_blocks and config.kv_idle_seconds:
            self._window = UseWindow(config.kv_idle_seconds, time.monotonic())

    # ---- requests

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        kind: OutputKind,
        emit: Emit,
    ) -> RequestGroup:
        """Check a request and make it ready for :meth:`add`. Changes nothing in the engine.

        Raises:
            InvalidRequestError, RequestTooLongError: it cannot be served; the message says why.
        """
        arrival = time.monotonic()
        text, token_ids = tokenize(prompt, self._tokenizer)
        check_token_ids(token_ids, params, self.info.vocab_size)
        if params.priority and self._scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority is {params.priority}, but scheduling_policy is {self._scheduler.policy!r}; leave "
                "it out, or load the model with scheduling_policy='priority'",
                "priority",
            )
        max_tokens = params.max_tokens or max(1, self.info.longest_sequence - len(token_ids))
        if params.use_beam_search:
            return self._prepare_beams(request_id, text, token_ids, params, max_tokens, arrival, emit)
        sequences: list[Sequence] = []
        for index in range(params.num_sequences):
            name = request_id if params.num_sequences == 1 else f"{request_id}#{index}"
            request = self._request(name, token_ids, params, index, max_tokens, arrival)
            self._scheduler.check_fits(request)
            if self._cache.enable_caching:
                # Here, on the caller's thread, and once for all answers: a long prompt takes a while.
                known = sequences[0].request.block_hashes if sequences else ()
                request.start_hashing(self._cache.hasher, known)
            sequences.append(Sequence(index, request, params, self._tokenizer))
        return RequestGroup(
            request_id, text, token_ids, params, sequences, kind=kind, arrival_time=arrival, emit=emit
        )

    def _prepare_beams(
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
        if width > self.info.max_num_seqs:
            raise InvalidRequestError(
                f"beam search of width {width} runs as many sequences at once, and max_num_seqs is "
                f"{self.info.max_num_seqs}: lower n or best_of, or raise it",
                "best_of" if params.best_of else "n",
            )
        root = self._beam_request(f"{request_id}#0", token_ids, params, max_tokens, arrival)
        self._scheduler.check_fits(root)
        if self._cache.enable_caching:
            root.start_hashing(self._cache.hasher)
        ends: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(self.info.eos_token_ids)
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
            max_tokens=min(max_tokens, self.info.max_model_len - len(token_ids)),
            arrival_time=arrival,
            emit=emit,
        )

    def _beam_request(
        self, name: str, token_ids: list[int], params: SamplingParams, max_tokens: int, arrival: float
    ) -> Request:
        """Reports twice as many candidates as there are beams: enough, though half of them may end."""
        return self._request(
            name,
            token_ids,
            params,
            0,
            max_tokens,
            arrival,
            candidates=min(2 * params.num_sequences, self.info.vocab_size),
        )

    def _request(
        self,
        name: str,
        token_ids: list[int],
        params: SamplingParams,
        index: int,
        max_tokens: int,
        arrival: float,
        candidates: int | None = None,
    ) -> Request:
        """The scheduler's request for answer ``index``; or one that reports candidates and is steered."""
        sampling = row_sampling(params, self.info, self._tokenizer, index, self._seeds)
        if candidates is not None:
            sampling = msgspec.structs.replace(sampling, logprobs=candidates)
        return Request(
            name,
            token_ids,
            sampling,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=self.info.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            ignore_eos=params.ignore_eos,
            priority=params.priority,
            arrival_time=arrival,
            cache_salt=params.cache_salt,
            is_steered=candidates is not None,
        )

    def fork(
        self,
        parent_id: str,
        request_id: str,
        params: SamplingParams | None,
        *,
        index: int,
        kind: OutputKind,
        emit: Emit,
    ) -> None:
        """Begin a request whose prompt is all that another has said so far; they share its blocks.

        Args:
            params: as for ``prepare``; ``None`` is the other's.
            index: of the other's answers.

        Raises:
            InvalidRequestError: the other is not being served (any more), has no such answer, or is a beam
                search; the salts differ; else as ``prepare`` and ``add``.
        """
        group = self._groups.get(parent_id)
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
        fork = self.prepare(request_id, list(parent.token_ids), params, kind=kind, emit=emit)
        self.add(fork, parent if shares else None)

    def add(self, group: RequestGroup, parent: Request | None = None) -> None:
        """Queue a prepared request.

        Args:
            parent: its prompt is what this request knows, whose blocks it shares.

        Raises:
            InvalidRequestError: a request of that id is being served.
        """
        # A request named like another's answer would take its place in the scheduler.
        ids = [sequence.request.request_id for sequence in group.sequences]
        if group.request_id in self._groups or any(key in self._sequences for key in ids):
            raise InvalidRequestError(f"request_id {group.request_id!r} is already in use", "request_id")
        self._asleep = False  # its first step lets the pool grow
        self._groups[group.request_id] = group
        first = group.sequences[0].request
        for sequence in group.sequences:
            request = sequence.request
            self._sequences[request.request_id] = (group, sequence)
            # The prompt is computed, and kept, once.
            shared_with = parent if request is first else first
            if shared_with is None:
                self._scheduler.add_request(request)
            else:
                self._scheduler.fork(shared_with, request, request.num_prompt_tokens)

    def abort(self, request: str | RequestGroup) -> None:
        """End a request now, named by its id or itself; ignored if it is not being served (any more)."""
        group = self._groups.get(request if isinstance(request, str) else request.request_id)
        if group is None or (isinstance(request, RequestGroup) and group is not request):
            return
        alive = [s for s in group.sequences if s.finish_reason is None]
        self._scheduler.abort([s.request.request_id for s in alive])
        for sequence in alive:
            self._end(sequence, "abort", None)
        self._report([group])

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._in_flight)

    # ---- steps

    def step(self) -> None:
        """Launch one step and account for one; outputs go to their requests' ``emit``.

        Where the runner can, a step is launched before the one before it is read, so that the host's
        work is done while the device computes. A step that raises fails the requests it
        computed, and those alone. One that finds no memory is taken back, and smaller ones follow; only
        a request that alone cannot run fails.

        Raises:
            Exception: the runner's, once :data:`MAX_FAILED_STEPS` steps in a row have raised.
        """
        self.give_back()
        ahead = self._runner.runs_ahead and self._scheduler.runs_ahead
        if self._in_flight and not ahead:
            self._land()
            return
        plan = self._scheduler.schedule(ahead=ahead)
        if plan.rows:
            self._launch(plan)
        elif not self._in_flight and self._refusals and self._cache.num_blocks < self.info.num_blocks:
            self._without_memory()
        elif not self._in_flight:
            # Waiting work and nothing to run cannot resolve itself: better a dead engine than a hang.
            raise RuntimeError(f"nothing can be scheduled for {len(self._sequences)} live requests")
        if self._in_flight and not (ahead and plan.rows and len(self._in_flight) == 1):
            self._land()

    def _launch(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for row in plan.rows:
            group, _ = self._sequences[row.request_id]
            if group.first_scheduled_time is None:
                group.first_scheduled_time = now
        if plan.num_blocks != self._pool_blocks:
            while self._in_flight:  # arrays are replaced: nothing may be using them
                self._land()
        try:
            launched = self._runner.launch(plan)
        except PoolMemoryError as error:
            self._refuse_growth(error)
            self._scheduler.withdraw(plan, self._pool_blocks)
        except Exception as error:
            self._took_size(plan)
            while self._in_flight:
                self._land()
            self._fail(plan, error)
        else:
            self._took_size(plan)
            self._in_flight.append((plan, launched))

    def _land(self, *, built_on: Exception | None = None) -> None:
        """Account for the oldest step in flight.

        Args:
            built_on: what the step before it raised: what becomes of this one says nothing.
        """
        plan, launched = self._in_flight.popleft()
        try:
            output = launched.read()
        except Exception as error:
            self._fail(plan, built_on or error, counts=built_on is None)
            while self._in_flight:  # to be over before anything is launched
                self._land(built_on=built_on or error)
            return
        if built_on is None:
            self._failed_steps = 0
            self._scheduler.limit.step_ended()
        planned = {row.request_id: row for row in plan.rows}
        rows = {row.request_id: row for row in output.rows}
        touched: dict[str, RequestGroup] = {}
        failed: dict[str, tuple[str, Exception | None]] = {}
        for request, token_ids in self._scheduler.update(plan, output):
            group, sequence = self._sequences[request.request_id]
            row = rows[request.request_id]
            touched[group.request_id] = group
            if row.failure is not None and request.is_finished:
                failed[group.request_id] = row.failure, None
                continue
            if isinstance(group, BeamGroup):
                group.offer(request, row)
                continue
            try:
                self._advance(group, sequence, planned[request.request_id], row, token_ids)
            except Exception as error:  # of one answer's text: no other need know
                failed[group.request_id] = f"its output raised {type(error).__name__}: {error}", error
        for request_id, (reason, cause) in failed.items():
            del touched[request_id]
            self._drop(request_id, reason, cause)
        for group in touched.values():
            if isinstance(group, BeamGroup) and group.round_is_over:
                self._next_round(group)
        self._report(touched.values())

    def _next_round(self, group: BeamGroup) -> None:
        """The requests of beams that lead nowhere end, others part where several lead on from one."""
        children = group.advance()
        if group.first_token_time is None:
            group.first_token_time = time.monotonic()
        given_up = [b for b in group.beams if not children.get(b.sequence.request.request_id)]
        self._scheduler.abort([beam.sequence.request.request_id for beam in given_up])
        for beam in given_up:
            self._end(beam.sequence, "abort", None)
        beams = []
        for beam in group.beams:
            parent = beam.sequence.request
            known = parent.num_tokens
            going = children.get(parent.request_id, [])
            for hypothesis in going[1:]:
                tokens = [*parent.token_ids, hypothesis.token_ids[-1]]
                left = parent.max_tokens - (len(tokens) - parent.num_prompt_tokens)
                child = self._beam_request(
                    group.new_name(), tokens, group.params, max(1, left), parent.arrival_time
                )
                sequence = Sequence(0, child, replace(group.params, detokenize=False), None)
                self._sequences[child.request_id] = (group, sequence)
                self._scheduler.fork(parent, child, known)
                beams.append(Beam(hypothesis, sequence))
            if going:
                self._scheduler.continue_with(parent, going[0].token_ids[-1])
                beams.append(Beam(going[0], beam.sequence))
        if beams:
            group.begin_round(beams)

    def _advance(
        self,
        group: RequestGroup,
        sequence: Sequence,
        planned: PlannedRow,
        row: RowOutput,
        token_ids: list[int],
    ) -> None:
        """Add what a step sampled to an answer, which may end it."""
        self._place_prompt_logprobs(group, planned, row)
        if token_ids and group.first_token_time is None:
            group.first_token_time = time.monotonic()
        sequence.append(token_ids, row.logprobs)
        request = sequence.request
        if sequence.stopped_by_text and not request.is_finished:
            self._scheduler.finish_request(request.request_id, None)
        if request.is_finished:
            assert request.finish_reason is not None
            self._end(sequence, request.finish_reason, request.stop_reason)

    def _place_prompt_logprobs(self, group: RequestGroup, planned: PlannedRow, row: RowOutput) -> None:
        if row.prompt_logprobs is not None:
            entries = [public_logprobs(entry, self._tokenizer) for entry in row.prompt_logprobs]
            group.set_prompt_logprobs(planned.start + 1, entries)

    def _end(self, sequence: Sequence, reason: str, stop_reason: str | int | None) -> None:
        sequence.finish(reason, stop_reason)
        del self._sequences[sequence.request.request_id]

    def _report(self, groups: Iterable[RequestGroup]) -> None:
        for group in groups:
            if group.finished:
                group.finished_time = time.monotonic()
                del self._groups[group.request_id]
            output = group.output()
            if output is not None:
                group.emit(output)

    def _fail(self, plan: StepPlan, error: Exception, *, counts: bool = True) -> None:
        hopeless = counts and plan.num_tokens == 1 and self._scheduler.limit.exhausted
        if isinstance(error, MemoryError) and not hopeless:
            self._retract(plan, error, counts=counts)
            return
        reason = f"the step that computed it raised {type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            reason = f"{_NO_MEMORY}: {error}"
        else:
            self._failed_steps += counts
        ended = self._scheduler.fail_step(plan)
        for request_id in dict.fromkeys(self._sequences[r.request_id][0].request_id for r in ended):
            self._drop(request_id, reason, error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _retract(self, plan: StepPlan, error: MemoryError, *, counts: bool) -> None:
        """A step found no memory: its requests start again, in smaller steps."""
        preempted = self._scheduler.retract_step(plan)
        if counts:
            tokens = self._scheduler.limit.lower(plan.num_tokens)
            logger.warning(
                "no memory for a step of %d tokens (%s): %d requests start again, %d tokens at a time",
                plan.num_tokens,
                str(error),  # a log that keeps its arguments must not keep the frames of the error
                len(preempted),
                tokens,
            )

    def _drop(self, request_id: str, reason: str, cause: Exception | None) -> None:
        """End a request, and its sequences that were not in the failed step, with an error."""
        group = self._groups.pop(request_id)
        for sequence in group.sequences:
            if not sequence.request.is_finished:
                self._scheduler.abort([sequence.request.request_id])
            self._sequences.pop(sequence.request.request_id, None)
        failure = RequestFailedError(f"request {request_id} failed: {reason}")
        failure.__cause__ = cause
        group.emit(failure)

    def close(self, error: Exception) -> None:
        """Tell every request still being served that none will be, and let go of the runner."""
        self._in_flight.clear()
        del self._runner  # model and pool are freed, whoever still holds the engine
        for group in list(self._groups.values()):
            group.emit(error)
        self._groups.clear()
        self._sequences.clear()

    # ---- the pool's size

    @property
    def is_sleeping(self) -> bool:
        """The pool has been given back, and no request has come since."""
        return self._asleep

    def sleep(self) -> None:
        """Give the pool's memory back, and forget every cached prefix. The next request wakes the engine.

        Raises:
            EngineBusyError: requests are being served.
        """
        if self.has_work:
            count = len(self._groups)
            raise EngineBusyError(
                f"the engine is serving {count} request{'' if count == 1 else 's'}: wait until they have "
                "ended, or abort them"
            )
        self._scheduler.reset_prefix_cache()
        self._resize(1)
        self._asleep = True

    def wake_up(self) -> None:
        """End a sleep: the pool has the size that it had at start. Nothing if the engine is awake.

        Raises:
            PoolMemoryError: there is no memory for it now.
        """
        if self._asleep:
            self._scheduler.allow_growth()
            self._resize(self._least_blocks)
            self._asleep = False

    def give_back(self) -> None:
        """Give back the memory of blocks that no request has used for ``kv_idle_seconds``."""
        now = time.monotonic()
        if self._refusals and now >= self._grow_again:
            self._scheduler.allow_growth()
        if self._window is None:
            return
        most = self._window.observe(self._cache.pool.num_held, now)
        if most is None:
            return
        growth, least = self._cache.pool.growth, self._least_blocks
        needed = least + max(0, -(-(1 + most - least) // growth)) * growth
        if needed < self._pool_blocks:
            while self._in_flight:
                self._land()
            self._resize(needed)

    def idle_seconds(self) -> float | None:
        """How long to wait at most before :meth:`give_back`; ``None`` if there is nothing to give."""
        if self._window is None or self._pool_blocks <= self._least_blocks:
            return None
        return self._window.left(time.monotonic())

    def _resize(self, num_blocks: int) -> None:
        plan = self._scheduler.resize(num_blocks)
        try:
            self._runner.launch(plan).read()
        except PoolMemoryError as error:
            self._refuse_growth(error)
            self._scheduler.resize(self._pool_blocks)
            raise
        self._took_size(plan)

    def _took_size(self, plan: StepPlan) -> None:
        self._growths += plan.num_blocks > self._pool_blocks
        self._shrinks += plan.num_blocks < self._pool_blocks
        self._pool_blocks = plan.num_blocks

    def _refuse_growth(self, error: PoolMemoryError) -> None:
        self._refusals += 1
        self._refusal = str(error)
        self._grow_again = time.monotonic() + GROWTH_PAUSE

    def _without_memory(self) -> None:
        """The first waiting request does not fit into the pool, even alone, and the pool cannot grow."""
        request = self._scheduler.waiting.peek()
        self._drop(self._sequences[request.request_id][0].request_id, self._refusal, None)

    # ---- looking in

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def describe(self) -> str:
        """The steps under way and the requests, for whoever looks for what hangs. From any thread."""
        return self._scheduler.describe()

    def stats(self) -> EngineStats:
        cache, scheduler = self._cache, self._scheduler
        return EngineStats(
            num_blocks=self.info.num_blocks,
            block_size=self.info.block_size,
            free_blocks=cache.num_free_blocks,
            cached_blocks=cache.num_cached_blocks,
            used_blocks=cache.num_usable_blocks - cache.num_free_blocks,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preemptions=scheduler.num_preemptions,
            prefix_queries=cache.stats.queries,
            prefix_hits=cache.stats.hits,
            pool_bytes=self.info.pool_bytes // self.info.num_blocks * self._pool_blocks,
            steps=scheduler.num_steps,
            pool_budget_bytes=self.info.pool_bytes,
            pool_growths=self._growths,
            pool_shrinks=self._shrinks,
            pool_growths_refused=self._refusals,
        )

    def blocks(self) -> BlocksView:
        """Who holds which block. O(blocks): about 50 ms for 100,000 of them."""
        requests = [sequence.request for _, sequence in self._sequences.values()]
        return view_blocks(self.info.model, self.stats(), self._cache, requests, self._scheduler.num_copies)
