"""The waiting requests, in the order in which they are admitted."""

import heapq
from collections import deque
from typing import Literal, Protocol

from mlx_paged_attention.scheduler.request import Request

Policy = Literal["fcfs", "priority"]


class WaitingQueue(Protocol):
    """Requests that wait to be admitted; only the first one may be."""

    def add(self, request: Request) -> None:
        """A new request joins."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request returns."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...


class FCFSQueue:
    """First come, first served; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest priority value first, then the earliest arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.service_key, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((request.service_key, request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def make_waiting_queue(policy: Policy) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()
