"""Scheduler: decides, step by step, which tokens of which requests are computed.

There is no prefill phase and no decode phase. Every request knows some tokens and has computed some of
them; a step hands out a budget of tokens to close the gaps: first to the running requests, then to
waiting ones as far as blocks allow. A running request that finds no free block takes them from the
request that is served last, which starts again later (preemption by recompute).
"""

from collections.abc import Iterable, Sequence

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.scheduler.chunked_prefill import ChunkedPrefill
from mlx_paged_attention.scheduler.describe import describe
from mlx_paged_attention.scheduler.forks import Fork
from mlx_paged_attention.scheduler.in_flight import InFlight, unpublish_failed
from mlx_paged_attention.scheduler.queue import Policy, WaitingQueue
from mlx_paged_attention.scheduler.refusals import check_fits, check_limits
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.request_queues import RequestQueues
from mlx_paged_attention.scheduler.step_draft import StepDraft
from mlx_paged_attention.scheduler.step_limit import StepLimit
from mlx_paged_attention.scheduler.step_plan import StepOutput, StepPlan
from mlx_paged_attention.scheduler.stop import can_go_ahead, check_stop

# Of a step's tokens, running prompts leave at most one in so many to waiting requests.
WAITING_SHARE = 4


class Scheduler:
    """Plans steps and takes in what they produced.

    ``schedule`` may be called again before the output of the plan before has come back, as long as
    plans run, and their outputs return, in order.

    Args:
        manager: the blocks; nobody else may allocate from it.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        max_model_len: longest sequence, prompt and output, in tokens.
        policy: who is served first: ``"fcfs"`` by order of arrival, ``"priority"`` by lowest
            ``Request.priority``, then earliest ``Request.arrival_time``, ``"longest_prefix"`` by most
            tokens in the prefix cache. Under ``"priority"`` the last of them is preempted first, else
            whoever was admitted last.
        max_overtaken_seconds: under ``"longest_prefix"``, how long a waiting request may be overtaken.
        long_prefill_token_threshold: most tokens one request computes per step; 0 is no limit.
        enable_chunked_prefill: spread a prompt over steps when it exceeds the budget left.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = "fcfs",
        max_overtaken_seconds: float = 5.0,
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
    ) -> None:
        check_limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.num_copies = 0  # blocks
        self.num_steps = 0
        self._prefill = ChunkedPrefill(
            long_prefill_token_threshold or max_num_batched_tokens, enabled=enable_chunked_prefill
        )
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._in_flight: dict[int, InFlight] = {}
        self._queues = RequestQueues(manager, policy, max_overtaken_seconds)
        self.limit = StepLimit(max_num_batched_tokens)

    @property
    def running(self) -> list[Request]:
        """The requests that hold blocks, in the order in which they were admitted."""
        return self._queues.running

    @property
    def waiting(self) -> WaitingQueue:
        """Those that may be admitted."""
        return self._queues.waiting

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests not running, preempted ones included."""
        return self._queues.num_waiting

    @property
    def _seats(self) -> int:
        """Most requests that may run now."""
        return self.limit.apply(self.max_num_seqs)

    @property
    def runs_ahead(self) -> bool:
        """Whether no running request has to wait for each of its tokens."""
        return all(request.runs_ahead for request in self.running)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # Requests come and go

    def check_fits(self, request: Request) -> None:
        """Refuses what could never be served, so that it cannot block the queue.

        Raises:
            RequestTooLongError: with the size asked for and the limit.
        """
        check_fits(request, self.manager, self.max_model_len)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestTooLongError: see ``check_fits``.
            InvalidRequestError: its id belongs to a request that is still alive.
        """
        self._register(request)
        self.waiting.add(request)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Queues a request that shares the blocks of the ``num_tokens`` it has in common with another.

        It begins once those have been computed and there is a seat. If the other has ended before, or models
        of this kind cannot part there, it waits like any other.

        Raises:
            RequestTooLongError, InvalidRequestError: as ``add_request``.
        """
        assert parent.token_ids[:num_tokens] == child.token_ids[:num_tokens]
        self._register(child, parent.block_hashes[: num_tokens // self.manager.block_size])
        if child.is_steered:  # it is a part of what its parent came for
            child.arrival_order = parent.arrival_order
        if parent.is_finished or not self.manager.can_fork:
            self.waiting.add(child)
        else:
            self._queues.forks.add(Fork(parent, child, num_tokens))
            self._start_forks()

    def continue_with(self, request: Request, token_id: int) -> None:
        """Gives a steered request its next token, which does not end it: who steers it knows when it ends."""
        request.append_token(token_id)
        self._queues.end_choice(request)

    def is_alive(self, request_id: str) -> bool:
        """Whether a request of this id runs or waits."""
        return request_id in self._requests

    def _register(self, request: Request, known: Sequence[bytes] = ()) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        self.check_fits(request)
        if self.manager.enable_caching:
            request.start_hashing(self.manager.hasher, known)
        request.arrival_order = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests at once and returns those that were still alive."""
        return self._finish_all(request_ids, RequestStatus.FINISHED_ABORTED)

    def finish_request(self, request_id: str, stop_reason: str | int | None) -> None:
        """Ends a request whose stop was found outside, in its text. Nothing if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_STOPPED, stop_reason)

    # A step

    def schedule(self, *, ahead: bool = False) -> StepPlan:
        """The next step. Its rows are counted as computed from now on.

        A plan without rows need not be run; it takes nothing away from the next one.

        Args:
            ahead: requests go on from a token that has not come back yet, where it cannot be their
                last. If it was, the row is for nobody, and so is its output. One plan may be
                out then, at most: a runner remembers the tokens of its last step only.
        """
        assert not ahead or len(self._in_flight) <= 1, "planning ahead of two plans"
        draft = StepDraft(self.manager)
        while True:
            self._start_forks()
            if not self._schedule_running(draft, ahead):
                self._schedule_waiting(draft)
            if draft or self._in_flight or not self._queues.make_way():
                break
        if not draft:
            self._start_forks()
            return StepPlan(self.num_steps, [], [], [])
        plan = draft.plan(self.num_steps, self._queues)
        self.num_copies += len(plan.copies)
        self._in_flight[plan.step] = InFlight(
            plan, draft.requests, self.manager.take_published(), draft.copied
        )
        self.num_steps += 1
        self._start_forks()
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> list[tuple[Request, list[int]]]:
        """Takes in what a step sampled and ends the requests that are complete.

        Returns:
            For every output row of a request that was still alive, in plan order, the request and
            its accepted tokens: those up to the one that ends it, and none if the row failed, which
            ends the request with ``"error"``, or was overtaken by a recomputation after a preemption,
            or others choose its tokens. Rows that are to be computed again are left out.

        Raises:
            ValueError: the output is not this plan's: another step, or a sampled token is missing.
        """
        if output.step != plan.step:
            raise ValueError(f"output of step {output.step} given for the plan of step {plan.step}")
        flight = self._in_flight[plan.step]
        flight.check(output)
        del self._in_flight[plan.step]
        flight.end()
        flight.publish_states(self.manager)
        planned = {row.request_id: row for row in plan.rows}
        results = []
        for row_output in output.rows:
            request, row = flight.requests[row_output.request_id], planned[row_output.request_id]
            if request.is_finished or request in flight.void:
                continue
            accepted: list[int] = []
            # A request preempted in flight may have been planned again before this came back;
            # whichever output comes first fills the position.
            fills = row.start + len(row.token_ids) == request.num_tokens
            if row_output.failure is not None:
                if not fills or request.status is not RequestStatus.RUNNING:
                    continue
                self.manager.condemn(request)
                self._finish(request, RequestStatus.FINISHED_ERROR)
            elif fills and request.is_steered:
                self._queues.await_choice(request)
            elif fills:
                for token_id in row_output.token_ids:
                    request.append_token(token_id)
                    accepted.append(token_id)
                    stop = check_stop(request, self.max_model_len)
                    if row_output.complete and (stop is None or stop[0] is RequestStatus.FINISHED_LENGTH):
                        stop = RequestStatus.FINISHED_STOPPED, None
                    if stop is not None:
                        self._finish(request, *stop)
                        break
            results.append((request, accepted))
        return results

    def fail_step(self, plan: StepPlan) -> list[Request]:
        """Cleans up after a step that raised: what it was to write is garbage.

        Ends its requests, and any other that found such blocks since, with ``"error"``, and makes
        the blocks unfindable. Returns the requests ended.
        """
        doomed = self._spoiled_by(plan)
        return self._finish_all([request.request_id for request in doomed], RequestStatus.FINISHED_ERROR)

    def retract_step(self, plan: StepPlan) -> list[Request]:
        """Cleans up after a step that raised, as ``fail_step``, but has its requests start again.

        Returns those preempted.
        """
        doomed = self._spoiled_by(plan)
        preempted = [request for request in self.running if request in doomed]
        for request in reversed(preempted):  # so that they wait in the order in which they ran
            self._queues.preempt(request)
        return preempted

    def _spoiled_by(self, plan: StepPlan) -> list[Request]:
        """Makes unfindable what a step that raised was to write; the requests whose blocks hold it."""
        failed = self._in_flight.pop(plan.step)
        failed.end()
        later = [flight for step, flight in self._in_flight.items() if step > plan.step]
        return unpublish_failed(self.manager, failed, later, self.running)

    def withdraw(self, plan: StepPlan, num_blocks: int) -> None:
        """Takes back the last plan, which needs more blocks than there is memory for; nothing of it has run.

        Its requests, and forks that share what it was to write, are preempted, and the pool does not grow
        until :meth:`allow_growth`.

        Args:
            num_blocks: as many as the runner has.
        """
        unseen = {new.request_id for new in plan.new}
        released = self._queues.take_released()
        self.retract_step(plan)
        gone = [*released, *self._queues.take_released()]
        self._queues.released = plan.released + [key for key in gone if key not in unseen]
        self.manager.pool.limit = num_blocks
        left = self.manager.shrink(num_blocks)
        assert left == num_blocks, "blocks that are not there belong to a request that was not planned"

    def allow_growth(self) -> None:
        """The pool may grow up to its budget (again)."""
        self.manager.pool.limit = self.manager.pool.max_blocks

    def resize(self, num_blocks: int) -> StepPlan:
        """A plan that computes nothing and changes the pool to ``num_blocks``, or as far down as goes.

        Nothing may be in flight.
        """
        assert not self._in_flight
        if num_blocks > self.manager.num_blocks:
            self.manager.pool.grow(num_blocks)
        else:
            self.manager.shrink(num_blocks)
        released = self._queues.take_released()
        return StepPlan(self.num_steps, [], [], released, num_blocks=self.manager.num_blocks)

    def withdraw_resize(self, plan: StepPlan, num_blocks: int) -> None:
        """Takes back a plan of :meth:`resize` for which there is no memory.

        Args:
            num_blocks: as many as the runner has.
        """
        self._queues.released = plan.released + self.resize(num_blocks).released

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets every published block.

        Args:
            reset_running_requests: preempt all running requests first; they are resumed later.

        Returns:
            ``False``, with nothing forgotten, if running requests still hold blocks.
        """
        if reset_running_requests:
            for request in reversed(self.running[:]):
                self._queues.preempt(request)
        return self.manager.reset_prefix_cache()

    def describe(self) -> str:
        """What is in flight, running and waiting, a line each. From any thread, if this one hangs."""
        running = list(self.running)
        waiting = [request for request in list(self._requests.values()) if request not in running]
        return describe([flight.plan for flight in list(self._in_flight.values())], running, waiting)

    # Inside a step

    def _schedule_running(self, draft: StepDraft, ahead: bool) -> bool:
        """Returns whether anything was preempted."""
        draft.budget = self.limit.apply(self.max_num_batched_tokens)
        kept = self._kept_for_waiting(draft.budget)
        before = self.num_preemptions
        running, allocate = self.running, self.manager.allocate_slots
        index = 0
        while index < len(running) and draft.budget > 0:
            request = running[index]
            start = request.num_computed_tokens
            num_after = len(running) - index - 1
            num_tokens = self._prefill.chunk(request, draft.budget, num_after=num_after, kept=kept)
            unknown = num_tokens <= 0  # its next token has not come back yet
            if unknown:
                if not ahead or not can_go_ahead(request, self.max_model_len):
                    index += 1
                    continue
                num_tokens = 1
            else:
                num_tokens = self.manager.states.chunk_end(request, start, start + num_tokens) - start
            write_from = max(start, self.manager.num_slots(request.request_id))
            new_block_ids = allocate(request, num_tokens)
            if unknown and new_block_ids is None:  # nobody loses blocks to what may be for nobody
                index += 1
                continue
            while new_block_ids is None:
                victim = self._queues.victim()
                draft.strike(victim)
                index -= running.index(victim) < index
                self._queues.preempt(victim)
                if victim is request:
                    break
                new_block_ids = allocate(request, num_tokens)
            if new_block_ids is not None:
                draft.add(request, num_tokens, new_block_ids, write_from)
                index += 1
        return self.num_preemptions > before

    def _schedule_waiting(self, draft: StepDraft) -> None:
        """Admits waiting requests as far as budget, seats and blocks allow."""
        if not self.waiting or draft.budget == 0 or len(self.running) >= self._seats:
            return
        manager = self.manager
        # Blocks that running prompts have yet to take. Admitting into them would only preempt later.
        reserved = sum(manager.num_missing_blocks(request) for request in self.running)
        while self.waiting and draft.budget > 0 and len(self.running) < self._seats:
            request = self.waiting.peek()
            hit = manager.get_computed_blocks(request)
            if manager.states.snapshot_is_coming(request, hit, self.running):
                break
            num_tokens = min(request.num_tokens - hit.num_tokens, self._prefill.limit(request))
            if num_tokens > draft.budget and not self._prefill.enabled:
                break
            num_tokens = min(num_tokens, draft.budget)
            if self._prefill.enabled:
                end = hit.num_tokens + num_tokens
                num_tokens = manager.states.chunk_end(request, hit.num_tokens, end, hit) - hit.num_tokens
            block_ids = manager.allocate_slots(
                request, num_tokens, hit, whole_sequence=True, reserved_blocks=reserved
            )
            if block_ids is None:
                break
            reserved += manager.num_missing_blocks(request)
            self._queues.admit(hit.num_tokens)
            held = len(hit.block_ids) // manager.num_groups  # blocks found in each layer group
            write_from = max(hit.num_tokens, held * manager.block_size)
            copy = (hit.copied_from, block_ids[len(hit.block_ids)]) if hit.copied_from else None
            draft.add(request, num_tokens, block_ids, write_from, copy=copy, admitted=True)

    def _kept_for_waiting(self, budget: int) -> int:
        """Tokens of a step that running prompts leave to those that are next to be admitted.

        So the first token of a short prompt does not wait for the end of a long one.
        """
        if not self._prefill.enabled or not self.waiting or len(self.running) >= self._seats:
            return 0
        first = self.waiting.peek()
        free = self.manager.pool.num_free - sum(map(self.manager.num_missing_blocks, self.running))
        if self.manager.num_missing_blocks(first) > free:
            return 0
        share = budget // WAITING_SHARE
        return share if len(self.waiting) > 1 else min(first.num_tokens, share)

    def _start_forks(self) -> None:
        for fork in self._queues.start_forks(self._seats):
            for flight in self._in_flight.values():  # they begin with what these have yet to write
                flight.fork(fork.parent, fork.child, fork.num_tokens)

    # Endings

    def _finish_all(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        alive = [self._requests[key] for key in dict.fromkeys(request_ids) if key in self._requests]
        for request in alive:
            self._finish(request, status)
        return alive

    def _finish(self, request: Request, status: RequestStatus, stop_reason: str | int | None = None) -> None:
        """Takes the request out of the books and its blocks back."""
        del self._requests[request.request_id]
        self.limit.forget(request.request_id)
        complete = status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
        if complete and request.status is RequestStatus.RUNNING:
            self.manager.publish_rest(request)
        self._queues.remove(request)
        request.finish(status, stop_reason)
        self._queues.queue_forks_of(request)
