"""Random traffic through the scheduler, steps planned up to two ahead, on a runner that checks every step.

The fake runner's tokens depend on the tokens before them alone. So whatever is shared, chunked,
preempted, resumed or overtaken, every request must get exactly the answer it gets alone.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from fake_runner import FakeRunner, expected_output, make_manager, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.errors import RequestTooLongError
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN, StepPlan

MAX_MODEL_LEN = 40


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        start_blocks=st.sampled_from([None, 1, 2, 4]),
        block_size=st.sampled_from([1, 2, 4]),
        cache=st.fixed_dictionaries(
            {
                "enable_caching": st.sampled_from([True, True, False]),
                "full_hit": st.sampled_from(["one_token", "recompute_block"]),
                "partial_hits": st.booleans(),
                "fold_duplicates": st.booleans(),
            }
        ),
        options=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 5),
                "max_num_batched_tokens": st.sampled_from([5, 8, 16, 64]),
                "policy": st.sampled_from(["fcfs", "priority", "longest_prefix"]),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
                "enable_chunked_prefill": st.booleans(),
            }
        ),
        snapshots=st.sampled_from([None, None, 0, 1, 5]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (None, 3, 3), (1,), (4, 9), (None, 8)]),
    )
    def start(
        self,
        num_blocks: int,
        start_blocks: int | None,
        block_size: int,
        cache: dict[str, Any],
        options: dict[str, Any],
        snapshots: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        """``start_blocks``: of an elastic pool, or ``None``.

        ``snapshots``: slots for states beyond what requests need; ``None`` is a model without states.
        """
        if not options["enable_chunked_prefill"]:
            options = {**options, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0}
        states = None
        if snapshots is not None and windows == (None,):
            states = StateSlots(1 + 2 * options["max_num_seqs"] + snapshots, block_size)
        limit = options["long_prefill_token_threshold"] or options["max_num_batched_tokens"]
        self.elastic = start_blocks is not None
        self.manager = make_manager(
            start_blocks or num_blocks,
            block_size,
            max_blocks=num_blocks,
            on_evict=lambda *block: self.evicted.append(block),
            states=states,
            windows=windows,
            max_step_tokens=limit,
            **cache,
        )
        self.scheduler = Scheduler(self.manager, max_model_len=MAX_MODEL_LEN, **options)
        self.runner = FakeRunner(block_size, windows)
        self.runner.num_blocks = self.manager.num_blocks
        self.evicted: list[tuple[int, bytes]] = []
        self.unpublished: set[int] = set()
        unpublish = self.manager.pool.unpublish

        def noted(block_ids: Iterable[int]) -> None:
            ids = list(block_ids)
            self.unpublished.update(ids)
            unpublish(ids)

        self.manager.pool.unpublish = noted
        self.requests: list[Request] = []
        self.in_flight: deque[StepPlan] = deque()
        self.idle = 0

    @rule(
        # Few kinds of start and one kind of end: prompts share prefixes and whole prompts.
        start=st.integers(0, 1),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        is_steered=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self,
        start: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        prompt_logprobs: int | None,
        is_steered: bool,
    ) -> None:
        request = make_request(
            str(len(self.requests)),
            [start] * length + tail,
            max_tokens=max_tokens,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            is_steered=is_steered,
        )
        try:
            self.scheduler.add_request(request)
        except RequestTooLongError:
            longest = min(request.num_tokens + max_tokens, MAX_MODEL_LEN)
            blocks = -(-longest // self.manager.block_size)
            assert blocks * self.manager.num_groups > self.manager.num_usable_blocks
        else:
            self.requests.append(request)

    @precondition(lambda self: any(not request.is_finished for request in self.requests))
    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 12),
        is_steered=st.sampled_from([False, False, True]),
    )
    def fork(self, data: st.DataObject, tail: list[int], max_tokens: int, is_steered: bool) -> None:
        """Of an answer so far, of the prompt alone, or of some tokens and others after them."""
        alive = [request for request in self.requests if not request.is_finished]
        parent = data.draw(st.sampled_from(alive))
        known = parent.num_tokens
        shared = data.draw(st.sampled_from([known, parent.num_prompt_tokens, max(1, known - 2)]))
        child = make_request(
            str(len(self.requests)),
            [*parent.token_ids[:shared], *tail],
            max_tokens=max_tokens,
            is_steered=is_steered,
        )
        try:
            self.scheduler.fork(parent, child, shared)
        except RequestTooLongError:
            return
        self.requests.append(child)

    @precondition(lambda self: self.undecided)
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        self.decide(data.draw(st.sampled_from(self.undecided)))

    @property
    def undecided(self) -> list[Request]:
        return [r for r in self.requests if r.awaits_choice and not r.is_finished]

    def decide(self, request: Request) -> None:
        """What the runner has sampled is what a lone request would say."""
        output = expected_output(request.prompt_token_ids, request.num_output_tokens + 1)
        if len(output) == request.max_tokens or request.num_tokens + 1 == MAX_MODEL_LEN:
            self.scheduler.abort([request.request_id])  # who steers a request knows when it ends
        else:
            self.scheduler.continue_with(request, output[-1])

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule(ahead=st.booleans())
    def plan(self, ahead: bool) -> None:
        scheduler, was_empty = self.scheduler, not self.in_flight
        forked = {request.request_id for request in scheduler.running} & scheduler._queues._entering
        before = {request.request_id: request.num_computed_tokens for request in scheduler.running}
        preempted = {request.request_id: request.num_preemptions for request in self.requests}
        ran, was_decided = scheduler.running[:], not self.undecided
        pending = {fork.child.request_id for fork in scheduler._queues.forks.all()}
        alive = [request for request in self.requests if not request.is_finished]
        # Forks of what waits for a choice wait for it, too, and so do theirs.
        held: set[str] = set()
        for fork in scheduler._queues.forks.all():  # a parent is asked for before its forks
            if fork.parent.awaits_choice or fork.parent.request_id in held:
                held.add(fork.child.request_id)
        idle = [r for r in alive if r.status is not RequestStatus.RUNNING and r.request_id not in held]
        waited = any(not request.awaits_choice for request in idle)
        published = {(b.block_id, b.block_hash) for b in self.manager.pool.blocks if b.block_hash}
        self.evicted.clear()
        self.unpublished.clear()
        plan = scheduler.schedule(ahead=ahead)
        blocks = self.manager.pool.blocks
        still = {(i, key) for i, key in published if blocks[i].block_hash == key}
        # A folded duplicate may be given to who publishes the same in it again.
        final = {block_id for block_id, _ in still.difference(self.evicted)} - self.unpublished

        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert scheduler.num_running <= scheduler.max_num_seqs
        # Where nothing else can run, whoever waits for a choice makes way for those that wait.
        if was_decided and any(r.status is RequestStatus.PREEMPTED for r in ran):
            assert {new.request_id for new in plan.new} <= forked | pending
        running = {request.request_id: request for request in scheduler.running}
        entering = {new.request_id for new in plan.new}
        for row in plan.rows:
            request = running[row.request_id]
            end = row.start + len(row.token_ids)
            if row.token_ids == [UNKNOWN_TOKEN]:
                assert ahead
                assert row.start == request.num_tokens
                assert request.num_output_tokens + 1 < request.max_tokens
                assert request.num_tokens + 1 < MAX_MODEL_LEN
                assert request.num_samples_in_flight == 2
            else:
                assert row.token_ids == request.token_ids[row.start : end] != []
                assert end <= request.num_tokens
            if request.num_preemptions == preempted[row.request_id]:
                assert row.start == before.get(row.request_id, row.start)
                assert (row.request_id in before) != (row.request_id in entering - forked)
                assert (row.request_id in forked) == (row.request_id in entering and row.request_id in before)
            assert request.num_computed_tokens == end
            assert row.sample == (end >= request.num_tokens)
            tables, size = self.manager.tables(row.request_id), self.manager.block_size
            count = len(row.new_block_ids) // len(tables)
            added = [block_id for table in tables for block_id in table[len(table) - count :]]
            assert added == row.new_block_ids
            for table in tables if row.write_from < end else ():
                assert final.isdisjoint(table[row.write_from // size : -(-end // size)])
        assert (plan.num_blocks or self.manager.num_blocks) == self.manager.num_blocks
        assert self.manager.num_blocks <= self.manager.num_usable_blocks + 1
        if plan.rows:
            self.in_flight.append(plan)
            self.idle = 0
        elif was_empty and waited and self.manager.pool.limit == self.manager.pool.max_blocks:
            self.idle += 1
            assert self.idle < 2, "waiting requests and two steps that computed nothing"

    @precondition(lambda self: not self.in_flight)
    @rule(steps=st.integers(1, 6))
    def take_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.plan(ahead=False)
            while self.in_flight:
                self.deliver()

    @precondition(lambda self: self.in_flight)
    @rule()
    def deliver(self) -> None:
        plan = self.in_flight.popleft()
        self.scheduler.update(plan, self.runner.run(plan))

    @precondition(lambda self: self.in_flight)
    @rule(start_again=st.booleans())
    def break_a_step(self, start_again: bool) -> None:
        plan = self.in_flight.popleft()
        self.runner.fail(plan)
        if start_again:
            for request in self.scheduler.retract_step(plan):
                assert request.status is RequestStatus.PREEMPTED
        else:
            self.scheduler.fail_step(plan)
        # Those ended or preempted before may have rows in the next plan that read the garbage, for nobody.
        idle = [r.request_id for r in self.requests if r.status is not RequestStatus.RUNNING]
        self.runner.forget(idle, self.in_flight)

    @precondition(lambda self: self.elastic and not self.in_flight)
    @rule(num_blocks=st.integers(1, 24))
    def resize(self, num_blocks: int) -> None:
        """On request, or after a time without use: also while requests run."""
        pool = self.manager.pool
        held = [block.block_id for block in pool.blocks if block.ref_count]
        before = pool.num_blocks
        plan = self.scheduler.resize(min(num_blocks, pool.limit))
        if num_blocks <= before:
            assert plan.num_blocks == max(num_blocks, *(key + 1 for key in held), 1)
        else:
            assert plan.num_blocks == min(num_blocks, pool.limit)
        assert self.runner.run(plan).rows == []

    @precondition(lambda self: self.elastic and len(self.in_flight) < 2)
    @rule(ahead=st.booleans())
    def plan_without_memory(self, ahead: bool) -> None:
        """A plan that needs a larger pool than the runner's is taken back; others run."""
        self.plan(ahead)
        if not self.in_flight:
            return
        plan = self.in_flight.pop()
        while self.in_flight:
            self.deliver()
        if self.runner.num_blocks == plan.num_blocks:
            self.in_flight.append(plan)
            return
        self.scheduler.withdraw(plan, self.runner.num_blocks)
        assert self.manager.num_blocks == self.runner.num_blocks
        self.books_agree()
        if ahead:  # the next one makes do with what there is
            self.plan(ahead=False)
            assert self.manager.num_blocks == self.runner.num_blocks

    @precondition(lambda self: self.manager.pool.limit < self.manager.pool.max_blocks)
    @rule()
    def have_memory_again(self) -> None:
        self.scheduler.allow_growth()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        alive = not request.is_finished
        assert self.scheduler.abort([request.request_id]) == ([request] if alive else [])
        assert request.is_finished

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.scheduler.finish_request(request.request_id, "###")
        assert request.is_finished

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert done == (self.scheduler.num_running == 0)
        if done:
            assert self.manager.num_cached_blocks == 0

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        alive = [request for request in self.requests if not request.is_finished]
        running = [request for request in alive if request.status is RequestStatus.RUNNING]
        assert sorted(map(id, running)) == sorted(map(id, self.scheduler.running))
        assert len(alive) - len(running) == self.scheduler.num_waiting
        for request in self.requests:
            assert bool(self.manager.block_ids(request.request_id)) == (request in running)

    @invariant()
    def answers_are_those_of_a_lone_request(self) -> None:
        for request in getattr(self, "requests", []):
            if request.finish_reason != "error":
                output = request.output_token_ids
                assert output == expected_output(request.prompt_token_ids, len(output))

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.in_flight:
            self.deliver()
        self.scheduler.allow_growth()
        for _ in range(600):
            if not self.scheduler.has_unfinished_requests:
                break
            self.plan(ahead=False)
            while self.in_flight:
                self.deliver()
            for request in self.undecided:
                self.decide(request)
        for request in self.requests:
            assert request.is_finished
            if request.finish_reason == "length":
                total = min(request.num_prompt_tokens + request.max_tokens, MAX_MODEL_LEN)
                assert request.num_tokens == total
        self.books_agree()
        self.answers_are_those_of_a_lone_request()
        assert self.manager.usage == 0.0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
