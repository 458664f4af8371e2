"""Engine: requests in, one step at a time, outputs out."""

import logging
import time
from collections import deque
from dataclasses import replace

from mlx_paged_attention.cache.block_hash import root_hash
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.cache.use_window import UseWindow
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.beams import BeamGroup, next_round
from mlx_paged_attention.engine.blocks_view import BlocksView, view_blocks
from mlx_paged_attention.engine.elastic_pool import ElasticPool
from mlx_paged_attention.engine.group import Emit, OutputKind, RequestGroup
from mlx_paged_attention.engine.live_requests import LiveRequests
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats
from mlx_paged_attention.engine.request_builder import RequestBuilder
from mlx_paged_attention.engine.runner_interface import LaunchedStep, Runner
from mlx_paged_attention.engine.sequence import Sequence
from mlx_paged_attention.engine.stats import gather_stats
from mlx_paged_attention.errors import EngineBusyError, FormFailedError, PoolMemoryError, RequestFailedError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import PlannedRow, RowOutput, StepPlan
from mlx_paged_attention.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NO_MEMORY = (
    "there is no memory to compute even one token of it. Close other programs, or load the model with a "
    "smaller pool (kv_memory) or a smaller model"
)

# This many steps in a row that raise mean that the fault is not in a request.
MAX_FAILED_STEPS = 3


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
        self._builder = RequestBuilder(
            info,
            tokenizer,
            policy=config.scheduling_policy,
            check_fits=self._scheduler.check_fits,
            hasher=self._cache.hasher if self._cache.enable_caching else None,
            seed=config.seed,
        )
        self._live = LiveRequests()
        self._failed_steps = 0
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        window = None
        if info.start_blocks and config.kv_idle_seconds:
            window = UseWindow(config.kv_idle_seconds, time.monotonic())
        self._pool = ElasticPool(self._cache.num_blocks, self._cache.pool.growth, window)

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
        return self._builder.build(request_id, prompt, params, kind=kind, emit=emit)

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
        fork, parent = self._builder.build_fork(
            self._live.get(parent_id), parent_id, request_id, params, index=index, kind=kind, emit=emit
        )
        self.add(fork, parent)

    def add(self, group: RequestGroup, parent: Request | None = None) -> None:
        """Queue a prepared request.

        Args:
            parent: its prompt is what this request knows, whose blocks it shares.

        Raises:
            InvalidRequestError: a request of that id is being served.
        """
        self._live.add(group)
        self._pool.is_sleeping = False  # its first step lets the pool grow
        first = group.sequences[0].request
        for sequence in group.sequences:
            request = sequence.request
            # The prompt is computed, and kept, once.
            shared_with = parent if request is first else first
            if shared_with is None:
                self._scheduler.add_request(request)
            else:
                self._scheduler.fork(shared_with, request, request.num_prompt_tokens)

    def abort(self, request: str | RequestGroup | Emit) -> None:
        """End a request now, named by its id, itself, or where its outputs go.

        Ignored if it is not being served (any more).
        """
        group = self._live.find(request)
        if group is None:
            return
        alive = [s for s in group.sequences if s.finish_reason is None]
        self._scheduler.abort([s.request.request_id for s in alive])
        for sequence in alive:
            self._live.end(sequence, "abort")
        self._live.report([group])

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

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
        was_busy = self.has_work
        self.give_back()
        if was_busy and not self.has_work:  # the last request ended with a step that had to be read for that
            return
        ahead = self._runner.runs_ahead and self._scheduler.runs_ahead
        if self._in_flight and not ahead:
            self._land()
            return
        plan = self._scheduler.schedule(ahead=ahead)
        if plan.rows:
            self._launch(plan)
        elif not self._in_flight:
            self._grow_or_refuse()
        if self._in_flight and not (ahead and plan.rows and len(self._in_flight) == 1):
            self._land()

    def _launch(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for row in plan.rows:
            group, _ = self._live.of(row.request_id)
            if group.first_scheduled_time is None:
                group.first_scheduled_time = now
        if plan.num_blocks != self._pool.num_blocks:
            while self._in_flight:  # arrays are replaced: nothing may be using them
                self._land()
        try:
            launched = self._runner.launch(plan)
        except PoolMemoryError as error:
            self._pool.refused(str(error), time.monotonic())
            self._scheduler.withdraw(plan, self._pool.num_blocks)
        except Exception as error:
            self._pool.changed(plan.num_blocks)
            while self._in_flight:
                self._land()
            self._fail(plan, error)
        else:
            self._pool.changed(plan.num_blocks)
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
            self._scheduler.limit.step_ended(plan)
        planned = {row.request_id: row for row in plan.rows}
        rows = {row.request_id: row for row in output.rows}
        touched: dict[str, RequestGroup] = {}
        failed: dict[str, tuple[str, Exception | None]] = {}
        by_form: set[str] = set()
        for request, token_ids in self._scheduler.update(plan, output):
            group, sequence = self._live.of(request.request_id)
            row = rows[request.request_id]
            touched[group.request_id] = group
            if row.failure is not None and request.is_finished:
                failed[group.request_id] = row.failure, None
                if row.by_form:
                    by_form.add(group.request_id)
                continue
            if isinstance(group, BeamGroup):
                group.offer(request, row)
                continue
            try:
                self._advance(group, sequence, planned[request.request_id], row, token_ids)
            except Exception as error:  # of one answer's text: no other need know
                failed[group.request_id] = f"its output raised {type(error).__name__}: {error}", error
        for request_id, (reason, cause) in failed.items():
            kind = FormFailedError if request_id in by_form else RequestFailedError
            self._drop(touched.pop(request_id), reason, cause, kind)
        for group in touched.values():
            if isinstance(group, BeamGroup) and group.round_is_over:
                self._next_round(group)
        self._live.report(touched.values())

    def _next_round(self, group: BeamGroup) -> None:
        ended, begun = next_round(group, self._scheduler, self._builder.beam)
        if group.first_token_time is None:
            group.first_token_time = time.monotonic()
        for sequence in ended:
            self._live.end(sequence, "abort")
        for sequence in begun:
            self._live.begin(group, sequence)

    def _advance(
        self,
        group: RequestGroup,
        sequence: Sequence,
        planned: PlannedRow,
        row: RowOutput,
        token_ids: list[int],
    ) -> None:
        """Add what a step sampled to an answer, which may end it."""
        group.take(sequence, planned, row, token_ids)
        request = sequence.request
        if sequence.stopped_by_text and not request.is_finished:
            self._scheduler.finish_request(request.request_id, None)
        if request.is_finished:
            assert request.finish_reason is not None
            self._live.end(sequence, request.finish_reason, request.stop_reason)

    def _fail(self, plan: StepPlan, error: Exception, *, counts: bool = True) -> None:
        hopeless = counts and self._scheduler.limit.is_hopeless(plan)
        if isinstance(error, MemoryError) and not hopeless:
            self._retract(plan, error, counts=counts)
            return
        reason = f"the step that computed it raised {type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            reason = f"{_NO_MEMORY}: {error}"
        else:
            self._failed_steps += counts
        ended = self._scheduler.fail_step(plan)
        for group in self._live.groups_of(ended):
            self._drop(group, reason, error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _retract(self, plan: StepPlan, error: MemoryError, *, counts: bool) -> None:
        """A step found no memory: its requests start again, in smaller steps."""
        preempted = self._scheduler.retract_step(plan)
        if counts:
            tokens = self._scheduler.limit.lower(plan)
            logger.warning(
                "no memory for a step of %d tokens (%s): %d requests start again, %d tokens at a time",
                plan.num_tokens,
                str(error),  # a log that keeps its arguments must not keep the frames of the error
                len(preempted),
                tokens,
            )

    def _drop(
        self,
        group: RequestGroup,
        reason: str,
        cause: Exception | None,
        kind: type[RequestFailedError] = RequestFailedError,
    ) -> None:
        """End a request, and its sequences that were not in the failed step, with an error."""
        for sequence in group.sequences:
            if not sequence.request.is_finished:
                self._scheduler.abort([sequence.request.request_id])
        failure = kind(f"request {group.request_id} failed: {reason}")
        failure.__cause__ = cause
        self._live.fail(group, failure)

    def close(self, error: Exception) -> None:
        """Tell every request still being served that none will be, and let go of the runner."""
        self._in_flight.clear()
        del self._runner  # model and pool are freed, whoever still holds the engine
        self._live.fail_all(error)

    # ---- the pool's size

    @property
    def is_sleeping(self) -> bool:
        """The pool has been given back, and no request has come since."""
        return self._pool.is_sleeping

    def sleep(self) -> None:
        """Give the pool's memory back, and forget every cached prefix. The next request wakes the engine.

        Raises:
            EngineBusyError: requests are being served.
            PoolMemoryError: there is no memory for a smaller pool beside this one; it stays as it is.
        """
        if self.has_work:
            count = len(self._live)
            raise EngineBusyError(
                f"the engine is serving {count} request{'' if count == 1 else 's'}: wait until they have "
                "ended, or abort them"
            )
        self._scheduler.reset_prefix_cache()
        self._resize(1)
        self._pool.is_sleeping = True

    def wake_up(self) -> None:
        """End a sleep: the pool has the size that it had at start. Nothing if the engine is awake.

        Raises:
            PoolMemoryError: there is no memory for it now.
        """
        if self._pool.is_sleeping:
            self._scheduler.allow_growth()
            self._resize(self._pool.least)
            self._pool.is_sleeping = False

    def give_back(self) -> None:
        """Give back the memory of blocks that no request has used for ``kv_idle_seconds``."""
        now = time.monotonic()
        if self._pool.may_grow_again(now):
            self._scheduler.allow_growth()
        num_blocks = self._pool.to_keep(self._cache.pool.num_held, now)
        if num_blocks is not None:
            while self._in_flight:
                self._land()
            try:
                self._resize(num_blocks)
            except PoolMemoryError as error:
                logger.warning("memory that nobody uses is kept a while longer: %s", str(error))

    def idle_seconds(self) -> float | None:
        """How long to wait at most before :meth:`give_back`; ``None`` if there is nothing to give."""
        return self._pool.idle_seconds(time.monotonic())

    def _resize(self, num_blocks: int) -> None:
        plan = self._scheduler.resize(num_blocks)
        try:
            self._runner.launch(plan).read()
        except PoolMemoryError as error:
            if plan.num_blocks > self._pool.num_blocks:
                self._pool.refused(str(error), time.monotonic())
            self._scheduler.withdraw_resize(plan, self._pool.num_blocks)
            raise
        self._pool.changed(plan.num_blocks)

    def _grow_or_refuse(self) -> None:
        """The first waiting request does not fit into the pool as it is, even alone.

        There may be memory by now for the pool to grow; if not, the request fails.

        Raises:
            RuntimeError: that is not why nothing can be scheduled.
        """
        self._scheduler.allow_growth()
        plan = self._scheduler.schedule()
        if not plan.rows:
            # Waiting work and nothing to run cannot resolve itself: better a dead engine than a hang.
            raise RuntimeError(f"nothing can be scheduled for {len(self._live.sequences)} live requests")
        refusals = self._pool.num_refusals
        self._launch(plan)
        if self._pool.num_refusals > refusals:  # and whoever was planned waits again
            group, _ = self._live.of(self._scheduler.waiting.peek().request_id)
            self._drop(group, self._pool.refusal, None)

    # ---- looking in

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def describe(self) -> str:
        """The steps under way and the requests, for whoever looks for what hangs. From any thread."""
        return self._scheduler.describe()

    def stats(self) -> EngineStats:
        return gather_stats(self.info, self._cache, self._scheduler, self._pool)

    def blocks(self) -> BlocksView:
        """Who holds which block. O(blocks): about 50 ms for 100,000 of them."""
        requests = [sequence.request for sequence in self._live.sequences]
        return view_blocks(self.info.model, self.stats(), self._cache, requests, self._scheduler.num_copies)
