"""The waiting requests, in the order in which they are admitted."""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from typing import Literal, Protocol

from mlx_paged_attention.scheduler.request import Request, RequestStatus

Policy = Literal["fcfs", "priority", "longest_prefix"]

# What is cached of a waiting request changes with every step; so many are looked up for each admission.
_LOOKUPS = 8


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
    """First come, first served; preempted requests go to the front, in order of arrival."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        place = len(self._requests)
        while place and self._requests[place - 1].arrival_order > request.arrival_order:
            place -= 1  # it is a fork, which has not waited here until now
        self._requests.insert(place, request)

    def put_back(self, request: Request) -> None:
        _put_back(self._requests, request)

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
        # The beams of a search are served alike: their ids tell them apart.
        self._heap: list[tuple[tuple[int, float, int], str, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.service_key, request.request_id, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        self._heap.remove((request.service_key, request.request_id, request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class LongestPrefixQueue:
    """Most cached tokens first, then the earliest arrival; preempted requests before all others.

    Finding out who is first looks up a bounded number of requests, however many wait: those that were
    best when last looked up, and some of the others in turn.

    Args:
        cached_tokens: how many of a request's tokens are in the prefix cache now.
        max_overtaken_seconds: whoever has waited as long goes before those with more cached tokens.
        clock: seconds.
    """

    def __init__(
        self,
        cached_tokens: Callable[[Request], int],
        max_overtaken_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cached_tokens = cached_tokens
        self._max_overtaken_seconds = max_overtaken_seconds
        self._clock = clock
        self._preempted: deque[Request] = deque()
        self._since: OrderedDict[Request, float] = OrderedDict()  # when they came, in this order
        # What was found at the last lookup, the longest ago first.
        self._cached: OrderedDict[Request, int] = OrderedDict()
        # By cached tokens; also entries that have been overtaken by others of the same request.
        self._heap: list[tuple[int, int, str, Request]] = []
        self._first: Request | None = None

    def add(self, request: Request) -> None:
        self._since[request] = self._clock()
        self._look_up(request)

    def put_back(self, request: Request) -> None:
        _put_back(self._preempted, request)
        self._first = None

    def peek(self) -> Request:
        if self._preempted:
            self._first = self._preempted[0]
            return self._first
        for request in list(islice(self._cached, _LOOKUPS)):
            self._look_up(request)
        oldest, since = next(iter(self._since.items()))
        overdue = self._clock() - since >= self._max_overtaken_seconds
        self._first = oldest if overdue else self._best()
        return self._first

    def pop(self) -> Request:
        """The request that was peeked at last."""
        request = self._first or self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        if request in self._since:
            del self._since[request], self._cached[request]
            self._tidy()
        else:
            self._preempted.remove(request)
        self._first = None

    def __len__(self) -> int:
        return len(self._preempted) + len(self._since)

    def _best(self) -> Request:
        lookups = 0
        while True:
            cached, _, _, request = self._heap[0]
            if self._cached.get(request) != -cached:
                heapq.heappop(self._heap)
            elif lookups == _LOOKUPS or self._look_up(request) == -cached:
                return request
            else:
                lookups += 1

    def _look_up(self, request: Request) -> int:
        cached = self._cached_tokens(request)
        if self._cached.get(request) != cached:
            heapq.heappush(self._heap, (-cached, request.arrival_order, request.request_id, request))
        self._cached[request] = cached
        self._cached.move_to_end(request)
        self._tidy()
        return cached

    def _tidy(self) -> None:
        """Let go of entries that mean nothing any more, once these are the most."""
        if len(self._heap) > 2 * len(self._cached):
            self._heap = [
                (-cached, request.arrival_order, request.request_id, request)
                for request, cached in self._cached.items()
            ]
            heapq.heapify(self._heap)


def _put_back(requests: deque[Request], request: Request) -> None:
    """Insert in front of all, but behind those that were put back before and arrived earlier."""
    place = 0
    for other in requests:
        if other.status is not RequestStatus.PREEMPTED or other.arrival_order > request.arrival_order:
            break
        place += 1
    requests.insert(place, request)


def make_waiting_queue(
    policy: Policy, cached_tokens: Callable[[Request], int], max_overtaken_seconds: float
) -> WaitingQueue:
    """A queue; the last two arguments as in :class:`LongestPrefixQueue`."""
    match policy:
        case "fcfs":
            return FCFSQueue()
        case "priority":
            return PriorityQueue()
        case "longest_prefix":
            return LongestPrefixQueue(cached_tokens, max_overtaken_seconds)
