"""HitRateWindow: the prefix cache's hit rate over the latest requests."""

from collections import deque


class HitRateWindow:
    """Hits per looked-up token over about the last ``max_requests`` requests."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._entries: deque[tuple[int, int, int]] = deque()
        self._requests = 0
        self._queries = 0
        self._hits = 0

    def observe(self, requests: int, queries: int, hits: int) -> None:
        """Adds ``requests`` lookups of ``queries`` tokens together, ``hits`` of which were found."""
        self._entries.append((requests, queries, hits))
        self._requests += requests
        self._queries += queries
        self._hits += hits
        while self._requests > self._max_requests and len(self._entries) > 1:
            old_requests, old_queries, old_hits = self._entries.popleft()
            self._requests -= old_requests
            self._queries -= old_queries
            self._hits -= old_hits

    @property
    def hit_rate(self) -> float:
        """Between 0 and 1; 0 before the first lookup."""
        return self._hits / self._queries if self._queries else 0.0
