import pytest
from fake_runner import make_request

from mlx_paged_attention.scheduler.queue import FCFSQueue, PriorityQueue, make_waiting_queue
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


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_can_leave_from_the_middle(policy: str) -> None:
    queue = make_waiting_queue(policy)
    requests = [request(i, priority=i) for i in range(5)]
    for item in requests:
        queue.add(item)
    queue.remove(requests[2])
    queue.remove(requests[0])
    assert [queue.pop() for _ in range(len(queue))] == [requests[1], requests[3], requests[4]]
