from typing import Any

import pytest
from fake_runner import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.scheduler.queue import (
    FCFSQueue,
    LongestPrefixQueue,
    PriorityQueue,
    make_waiting_queue,
)
from mlx_paged_attention.scheduler.request import Request


def request(order: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    made = make_request(str(order), [1], priority=priority, arrival_time=arrival_time)
    made.arrival_order = order
    return made


def test_fcfs_serves_by_arrival_and_puts_preempted_requests_in_front() -> None:
    queue = FCFSQueue()
    first, second, third = (request(i) for i in range(3))
    queue.add(second)
    queue.add(third)
    queue.put_back(first)
    assert queue.peek() is first
    assert [queue.pop(), queue.pop(), queue.pop()] == [first, second, third]
    assert len(queue) == 0


def test_preempted_requests_come_back_in_order_of_arrival_whatever_order_they_were_preempted_in() -> None:
    queue = FCFSQueue()
    waiting, *preempted = (request(i) for i in range(4))
    queue.add(waiting)
    for i in (1, 0, 2):
        preempted[i].admit(0)
        preempted[i].preempt()
        queue.put_back(preempted[i])
    assert [queue.pop() for _ in range(4)] == [*preempted, waiting]


def test_priorities_come_out_sorted() -> None:
    """Vector S8."""
    queue = PriorityQueue()
    for order, priority in enumerate([5, 1, 8, 3, 2, 7, 4, 6]):
        queue.add(request(order, priority))
    assert [queue.pop().priority for _ in range(len(queue))] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_equal_priorities_come_out_by_arrival() -> None:
    queue = PriorityQueue()
    requests = [request(0, 1, 3.0), request(1, 1, 2.0), request(2, 1, 2.0)]
    for item in requests:
        queue.put_back(item)
    assert queue.peek() is requests[1]
    assert [queue.pop() for _ in range(3)] == [requests[1], requests[2], requests[0]]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
def test_a_request_can_leave_from_the_middle(policy: str) -> None:
    queue = make_waiting_queue(policy, lambda request: 0, 5.0)
    requests = [request(i, priority=i) for i in range(5)]
    for item in requests:
        queue.add(item)
    queue.remove(requests[2])
    queue.remove(requests[0])
    assert [queue.pop() for _ in range(len(queue))] == [requests[1], requests[3], requests[4]]


class Prefixes:
    """What a cache holds of each request, a clock, and how often anybody looked."""

    def __init__(self, patience: float = 1e9) -> None:
        self.cached: dict[Request, int] = {}
        self.now = 0.0
        self.lookups = 0
        self.queue = LongestPrefixQueue(self.look_up, patience, lambda: self.now)

    def look_up(self, request: Request) -> int:
        self.lookups += 1
        return self.cached.get(request, 0)

    def add(self, order: int, cached: int) -> Request:
        made = request(order)
        self.cached[made] = cached
        self.queue.add(made)
        return made

    def pop(self) -> Request:
        first = self.queue.peek()
        assert self.queue.pop() is first
        return first


def test_the_longest_cached_prefix_goes_first_and_equals_by_arrival() -> None:
    prefixes = Prefixes()
    a, b, c, d = (prefixes.add(order, cached) for order, cached in enumerate([0, 32, 64, 32]))
    assert [prefixes.pop() for _ in range(4)] == [c, b, d, a]
    assert len(prefixes.queue) == 0


def test_what_has_been_cached_or_evicted_since_changes_the_order() -> None:
    prefixes = Prefixes()
    a, b, c = (prefixes.add(order, cached) for order, cached in enumerate([0, 32, 16]))
    prefixes.cached |= {a: 48, b: 0}
    assert [prefixes.pop() for _ in range(3)] == [a, c, b]


def test_nobody_is_overtaken_for_longer_than_the_bound() -> None:
    prefixes = Prefixes(patience=10.0)
    unlucky = prefixes.add(0, 0)
    for second in range(1, 10):
        prefixes.now = second
        lucky = prefixes.add(second, 100)
        assert prefixes.pop() is lucky
    prefixes.now = 10.0
    prefixes.add(10, 100)
    assert prefixes.pop() is unlucky


def test_preempted_requests_come_before_any_prefix() -> None:
    prefixes = Prefixes()
    waiting = prefixes.add(5, 100)
    second, first = request(2), request(1)
    for preempted in (second, first):
        prefixes.queue.put_back(preempted)
    assert len(prefixes.queue) == 3
    prefixes.queue.remove(second)
    assert [prefixes.pop(), prefixes.pop()] == [first, waiting]


def test_lookups_per_admission_do_not_grow_with_the_queue() -> None:
    prefixes = Prefixes()
    everybody = [prefixes.add(order, 0) for order in range(2000)]
    for turn in range(300):
        prefixes.cached[everybody[turn]] = turn
        prefixes.lookups = 0
        prefixes.pop()
        assert prefixes.lookups <= 20
    assert len(prefixes.queue._heap) <= 2 * len(prefixes.queue)


def test_a_late_hit_is_found_while_others_are_served() -> None:
    prefixes = Prefixes()
    everybody = [prefixes.add(order, 0) for order in range(100)]
    prefixes.cached[everybody[-1]] = 64
    served = [prefixes.pop() for _ in range(20)]
    assert everybody[-1] in served


@settings(deadline=None)
@given(st.data())
def test_any_traffic_comes_out_in_the_order_of_the_policy(data: st.DataObject) -> None:
    """With no more requests than are looked up at a time, the order is exact."""
    prefixes = Prefixes(patience=20.0)
    waiting: dict[Request, float] = {}
    for order in range(data.draw(st.integers(1, 60))):
        prefixes.now += data.draw(st.integers(0, 5))
        if len(waiting) < 8 and data.draw(st.booleans()):
            waiting[prefixes.add(order, data.draw(st.integers(0, 3)))] = prefixes.now
        elif waiting:
            changed = data.draw(st.sampled_from(list(waiting)))
            prefixes.cached[changed] = data.draw(st.integers(0, 3))
            if data.draw(st.booleans()):
                prefixes.queue.remove(changed)
                del waiting[changed]
                continue
            oldest = next(iter(waiting))
            best = max(waiting, key=lambda one: (prefixes.cached[one], -one.arrival_order))
            expected = oldest if prefixes.now - waiting[oldest] >= 20.0 else best
            assert prefixes.pop() is expected
            del waiting[expected]
        assert len(prefixes.queue) == len(waiting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_overtaken_seconds": -1}, "max_overtaken_seconds must be seconds, 0 or more, not -1"),
        ({"watchdog_seconds": float("nan")}, "watchdog_seconds must be seconds"),
        ({"watchdog_seconds": "60"}, "watchdog_seconds must be seconds"),
        ({"scheduling_policy": "longest_prefix", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"scheduling_policy": "shortest"}, "fcfs, priority, longest_prefix"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        EngineConfig(**options)
    assert refused.value.param == next(iter(options))
