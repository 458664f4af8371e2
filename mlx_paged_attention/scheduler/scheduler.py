"""Scheduler: decides, step by step, which tokens of which requests are computed.

There is no prefill phase and no decode phase. Every request knows some tokens and has computed some of
them; a step hands out a budget of tokens to close the gaps: first to the running requests, then to
waiting ones as far as blocks allow. A running request that finds no free block takes them from the
request that is served last, which starts again later (preemption by recompute).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError
from mlx_paged_attention.scheduler.describe import describe
from mlx_paged_attention.scheduler.forks import Fork, Forks
from mlx_paged_attention.scheduler.in_flight import InFlight, unpublish_failed
from mlx_paged_attention.scheduler.queue import Policy, make_waiting_queue
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.step_limit import StepLimit
from mlx_paged_attention.scheduler.step_plan import (
    UNKNOWN_TOKEN,
    NewRow,
    PlannedRow,
    StepOutput,
    StepPlan,
    TableChange,
)
from mlx_paged_attention.scheduler.stop import check_stop, ends_by_length

# A request that wants log-probabilities of its prompt needs logits of every prompt token it computes:
# 256 rows of a vocabulary of 150,000 are 150 MB.
MAX_SCORED_TOKENS = 256

# Of a step's tokens, running prompts leave at most one in so many to waiting requests.
WAITING_SHARE = 4


@dataclass(slots=True)
class _Scheduled:
    """A request's share of the step under construction; ``write_from`` as in ``PlannedRow``."""

    request: Request
    num_tokens: int
    new_block_ids: list[int]
    write_from: int
    copy: tuple[int, int] | None = None


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
        if max_num_batched_tokens < max_num_seqs:
            raise InvalidRequestError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}): every running request needs one token per step",
                "max_num_batched_tokens",
            )
        if not enable_chunked_prefill and (
            max_num_batched_tokens < max_model_len or long_prefill_token_threshold
        ):
            raise InvalidRequestError(
                "without chunked prefill a prompt is computed in one step: max_num_batched_tokens "
                f"({max_num_batched_tokens}) must be at least max_model_len ({max_model_len}) and "
                f"long_prefill_token_threshold ({long_prefill_token_threshold}) must be 0",
                "enable_chunked_prefill",
            )
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.running: list[Request] = []
        self.waiting = make_waiting_queue(policy, manager.estimate_hit, max_overtaken_seconds)
        self.num_preemptions = 0
        self.num_copies = 0  # blocks
        self.num_steps = 0
        self._threshold = long_prefill_token_threshold or max_num_batched_tokens
        self._chunked = enable_chunked_prefill
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._released: list[str] = []
        self._in_flight: dict[int, InFlight] = {}
        self._forks = Forks()
        self._entering: set[str] = set()  # running requests that no plan has named yet
        self.limit = StepLimit(max_num_batched_tokens)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests not running, preempted ones included."""
        return len(self.waiting) + len(self._forks)

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
        prompt = request.num_prompt_tokens
        if prompt >= self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {prompt} tokens; with max_model_len {self.max_model_len} it can have at "
                f"most {self.max_model_len - 1}. Shorten the prompt or raise max_model_len",
                "prompt",
            )
        longest = min(prompt + request.max_tokens, self.max_model_len)
        needed, usable = self.manager.need.most(longest), self.manager.num_usable_blocks
        if needed > usable:
            size, fits = self.manager.block_size, self.manager.need.longest(usable, longest)
            raise RequestTooLongError(
                f"prompt and answer may take {longest} tokens, that is {needed} KV blocks of {size}; "
                f"the pool has {usable} ({fits} tokens). Shorten the prompt, lower max_tokens or "
                "enlarge the pool",
                "max_tokens",
            )

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
        self._register(child)
        if parent.is_finished or not self.manager.can_fork:
            self.waiting.add(child)
        else:
            self._forks.add(Fork(parent, child, num_tokens))
            self._start_forks()

    def continue_with(self, request: Request, token_id: int) -> bool:
        """Gives a request that chooses no tokens itself its next one; whether it ended with it."""
        request.append_token(token_id)
        stop = check_stop(request, self.max_model_len)
        if stop is not None:
            self._finish(request, *stop)
        return stop is not None

    def _register(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        self.check_fits(request)
        if self.manager.enable_caching:
            request.start_hashing(self.manager.hasher)
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
        shares: dict[str, _Scheduled] = {}
        new: list[NewRow] = []
        while True:
            self._start_forks()
            budget, preempted = self._schedule_running(shares, ahead)
            if not preempted:
                new = self._schedule_waiting(shares, budget)
            if shares or self._in_flight or not self._make_way():
                break

        rows, copies, changes = [], [], []
        for share in shares.values():
            request, start = share.request, share.request.num_computed_tokens
            end = start + share.num_tokens
            changed = self.manager.take_changes(request.request_id)
            copies += changed.copies
            if request.request_id in self._entering:
                self._entering.remove(request.request_id)
                new.append(_new_row(request))
                share.new_block_ids = self.manager.block_ids(request.request_id)
            elif changed.indices:
                tables = self.manager.tables(request.request_id)
                changes += [
                    TableChange(request.request_id, index, [ids[index] for ids in tables])
                    for index in changed.indices
                ]
            if share.copy is not None:
                copies.append(share.copy)
            sample = end >= len(request.token_ids)
            rows.append(
                PlannedRow(
                    request.request_id,
                    request.token_ids[start:end] or [UNKNOWN_TOKEN],
                    start,
                    share.new_block_ids,
                    share.write_from,
                    sample,
                    *self.manager.states.plan(request.request_id, end),
                )
            )
            request.num_computed_tokens = end
            request.num_samples_in_flight += sample
            request.num_tokens_in_flight += share.num_tokens
        self._start_forks()
        if not rows:
            return StepPlan(self.num_steps, [], [], [])
        num_blocks = self.manager.num_blocks
        plan = StepPlan(self.num_steps, new, rows, self._released, copies, changes, num_blocks)
        self._released = []
        self.num_copies += len(copies)
        requests = {key: share.request for key, share in shares.items()}
        self._in_flight[plan.step] = InFlight(plan, requests, self.manager.take_published())
        self.num_steps += 1
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
        requests = flight.requests
        planned = {row.request_id: row for row in plan.rows}
        missing = {key for key, row in planned.items() if row.sample and not requests[key].is_finished}
        missing.difference_update([row.request_id for row in output.rows if row.token_ids or row.failure])
        if missing:
            raise ValueError(f"step {plan.step} sampled no token for {sorted(missing)}")
        del self._in_flight[plan.step]
        flight.end()
        flight.publish_states(self.manager)
        results = []
        for row_output in output.rows:
            request, row = requests[row_output.request_id], planned[row_output.request_id]
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
            elif fills and not request.is_steered:
                for token_id in row_output.token_ids:
                    request.append_token(token_id)
                    accepted.append(token_id)
                    stop = check_stop(request, self.max_model_len)
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
            self._preempt(request)
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
        released, self._released = self._released, []
        self.retract_step(plan)
        gone = [*released, *self._released]
        self._released = plan.released + [key for key in gone if key not in unseen]
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
        plan = StepPlan(self.num_steps, [], [], self._released, num_blocks=self.manager.num_blocks)
        self._released = []
        return plan

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets every published block.

        Args:
            reset_running_requests: preempt all running requests first; they are resumed later.

        Returns:
            ``False``, with nothing forgotten, if running requests still hold blocks.
        """
        if reset_running_requests:
            for request in reversed(self.running[:]):
                self._preempt(request)
        return self.manager.reset_prefix_cache()

    def describe(self) -> str:
        """What is in flight, running and waiting, a line each. From any thread, if this one hangs."""
        running = list(self.running)
        waiting = [request for request in list(self._requests.values()) if request not in running]
        return describe([flight.plan for flight in list(self._in_flight.values())], running, waiting)

    # Inside a step

    def _schedule_running(self, shares: dict[str, _Scheduled], ahead: bool) -> tuple[int, bool]:
        """Returns the budget left and whether anything was preempted."""
        budget = self.limit.apply(self.max_num_batched_tokens)
        kept = self._kept_for_waiting(budget)
        before = self.num_preemptions
        allocate = self.manager.allocate_slots
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            start = request.num_computed_tokens
            num_tokens = min(len(request.token_ids) - start, self._step_limit(request), budget)
            unknown = num_tokens <= 0  # its next token has not come back yet
            if unknown:
                if not ahead or not self._can_go_ahead(request):
                    index += 1
                    continue
                num_tokens = 1
            else:
                if self._chunked:
                    # A prompt leaves a token to each request after it, and something to those that wait,
                    # unless it ends with this step.
                    most = max(1, budget - (len(self.running) - index - 1))
                    ends = start + num_tokens == len(request.token_ids) and num_tokens <= most
                    num_tokens = num_tokens if ends else max(1, min(num_tokens, most - kept))
                num_tokens = self.manager.states.chunk_end(request, start, start + num_tokens) - start
            write_from = max(start, self.manager.num_slots(request.request_id))
            new_block_ids = allocate(request, num_tokens)
            if unknown and new_block_ids is None:  # nobody loses blocks to what may be for nobody
                index += 1
                continue
            while new_block_ids is None:
                victim = self._choose_victim()
                share = shares.pop(victim.request_id, None)
                if share is not None:
                    # Its row is struck from the step, so the blocks it was to fill stay unwritten.
                    self.manager.unpublish_from(victim.request_id, share.write_from)
                    budget += share.num_tokens
                index -= self.running.index(victim) < index
                self._preempt(victim)
                if victim is request:
                    break
                new_block_ids = allocate(request, num_tokens)
            if new_block_ids is not None:
                shares[request.request_id] = _Scheduled(request, num_tokens, new_block_ids, write_from)
                budget -= num_tokens
                index += 1
        return budget, self.num_preemptions > before

    def _schedule_waiting(self, shares: dict[str, _Scheduled], budget: int) -> list[NewRow]:
        """Admits waiting requests as far as budget, seats and blocks allow."""
        new: list[NewRow] = []
        seats = self.limit.apply(self.max_num_seqs)
        if not self.waiting or budget == 0 or len(self.running) >= seats:
            return new
        manager = self.manager
        # Blocks that running prompts have yet to take. Admitting into them would only preempt later.
        reserved = sum(manager.num_missing_blocks(request) for request in self.running)
        while self.waiting and budget > 0 and len(self.running) < seats:
            request = self.waiting.peek()
            hit = manager.get_computed_blocks(request)
            if manager.states.snapshot_is_coming(request, hit, self.running):
                break
            num_tokens = min(request.num_tokens - hit.num_tokens, self._step_limit(request))
            if num_tokens > budget and not self._chunked:
                break
            num_tokens = min(num_tokens, budget)
            if self._chunked:
                end = hit.num_tokens + num_tokens
                num_tokens = manager.states.chunk_end(request, hit.num_tokens, end, hit) - hit.num_tokens
            block_ids = manager.allocate_slots(
                request, num_tokens, hit, whole_sequence=True, reserved_blocks=reserved
            )
            if block_ids is None:
                break
            reserved += manager.num_missing_blocks(request)
            self.waiting.pop()
            self.running.append(request)
            request.admit(hit.num_tokens)
            new.append(_new_row(request))
            held = len(hit.block_ids) // manager.num_groups  # blocks found in each layer group
            write_from = max(hit.num_tokens, held * manager.block_size)
            copy = (hit.copied_from, block_ids[len(hit.block_ids)]) if hit.copied_from else None
            shares[request.request_id] = _Scheduled(request, num_tokens, block_ids, write_from, copy)
            budget -= num_tokens
        return new

    def _start_forks(self) -> None:
        for fork in self._forks.take_ready(self.limit.apply(self.max_num_seqs) - len(self.running)):
            child = fork.child
            if not self.manager.holds_window(fork.parent.request_id, fork.num_tokens - 1):
                self.waiting.add(child)  # the parent has gone on without it, and its windows have moved
                continue
            self.manager.fork(fork.parent.request_id, child.request_id, fork.num_tokens)
            child.admit(min(fork.num_tokens, child.num_tokens - 1))
            self.running.append(child)
            self._entering.add(child.request_id)

    def _kept_for_waiting(self, budget: int) -> int:
        """Tokens of a step that running prompts leave to those that are next to be admitted.

        So the first token of a short prompt does not wait for the end of a long one.
        """
        if not self._chunked or not self.waiting or len(self.running) >= self.limit.apply(self.max_num_seqs):
            return 0
        first = self.waiting.peek()
        free = self.manager.num_free_blocks - sum(map(self.manager.num_missing_blocks, self.running))
        if self.manager.num_missing_blocks(first) > free:
            return 0
        share = budget // WAITING_SHARE
        return share if len(self.waiting) > 1 else min(first.num_tokens, share)

    def _step_limit(self, request: Request) -> int:
        """Most tokens the request computes in one step."""
        if request.sampling.prompt_logprobs is None or not self._chunked:
            return self._threshold
        return min(self._threshold, MAX_SCORED_TOKENS)

    def _can_go_ahead(self, request: Request) -> bool:
        """Whether the token after the one that is on its way may be computed now."""
        one_on_its_way = (
            request.num_samples_in_flight == 1 and request.num_computed_tokens == request.num_tokens
        )
        ends = ends_by_length(request, request.num_tokens + 1, self.max_model_len)
        return one_on_its_way and request.runs_ahead and not ends

    def _choose_victim(self) -> Request:
        if self.policy == "priority":
            return max(self.running, key=lambda request: request.service_key)
        return self.running[-1]

    def _make_way(self) -> bool:
        """Where nothing runs though requests wait: one that is steered gives way, if there is one.

        Those that it is steered with may be among the waiting, and it gets no token before they have theirs.
        """
        steered = [request for request in self.running if request.is_steered]
        if not steered or not self.num_waiting:
            return False
        self._preempt(steered[-1], behind=True)
        return True

    def _preempt(self, request: Request, *, behind: bool = False) -> None:
        self._leave(request)
        request.preempt()
        if behind:
            self.waiting.add(request)
        else:
            self.waiting.put_back(request)
        self.num_preemptions += 1

    # Endings

    def _finish_all(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        alive = [self._requests[key] for key in dict.fromkeys(request_ids) if key in self._requests]
        for request in alive:
            self._finish(request, status)
        return alive

    def _finish(self, request: Request, status: RequestStatus, stop_reason: str | int | None = None) -> None:
        """Takes the request out of the books and its blocks back."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
                self.manager.publish_rest(request)
            self._leave(request)
        elif not self._forks.discard(request):
            self.waiting.remove(request)
        request.finish(status, stop_reason)
        for fork in self._forks.take_orphans(request):
            self.waiting.add(fork.child)

    def _leave(self, request: Request) -> None:
        """It runs no more, and its blocks are free."""
        self.running.remove(request)
        self.manager.free(request.request_id)
        if request.request_id in self._entering:
            self._entering.remove(request.request_id)
        else:
            self._released.append(request.request_id)


def _new_row(request: Request) -> NewRow:
    return NewRow(request.request_id, list(request.token_ids), request.num_prompt_tokens, request.sampling)
