"""LiveRequests: the requests that are being served."""

import time
from collections.abc import Iterable

from mlx_paged_attention.engine.group import Emit, RequestGroup
from mlx_paged_attention.engine.sequence import Sequence
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.scheduler.request import Request


class LiveRequests:
    """What callers asked for, by its id, and its sequences, by the ids of their requests in the scheduler."""

    def __init__(self) -> None:
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[str, tuple[RequestGroup, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have not ended."""
        return [sequence for _, sequence in self._sequences.values()]

    def get(self, request_id: str) -> RequestGroup | None:
        """What the caller named so, if it is still served."""
        return self._groups.get(request_id)

    def find(self, request: str | RequestGroup | Emit) -> RequestGroup | None:
        """What is served under this id, or is this group, or tells its outputs so."""
        if isinstance(request, str):
            return self._groups.get(request)
        if isinstance(request, RequestGroup):
            return request if self._groups.get(request.request_id) is request else None
        return next((group for group in self._groups.values() if group.emit is request), None)

    def of(self, request: str) -> tuple[RequestGroup, Sequence]:
        """The sequence whose request the scheduler knows by this id, and its group."""
        return self._sequences[request]

    def groups_of(self, requests: Iterable[Request]) -> list[RequestGroup]:
        """The groups of these requests, each once."""
        return list(dict.fromkeys(self._sequences[request.request_id][0] for request in requests))

    def add(self, group: RequestGroup) -> None:
        """Serve a group from now on.

        Raises:
            InvalidRequestError: a request of that id is being served.
        """
        # A request named like another's answer would take its place in the scheduler.
        ids = [sequence.request.request_id for sequence in group.sequences]
        if group.request_id in self._groups or any(key in self._sequences for key in ids):
            raise InvalidRequestError(f"request_id {group.request_id!r} is already in use", "request_id")
        self._groups[group.request_id] = group
        for sequence in group.sequences:
            self.begin(group, sequence)

    def begin(self, group: RequestGroup, sequence: Sequence) -> None:
        """A group gets another sequence."""
        self._sequences[sequence.request.request_id] = (group, sequence)

    def end(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """A sequence is complete; its group reports it."""
        sequence.finish(reason, stop_reason)
        del self._sequences[sequence.request.request_id]

    def report(self, groups: Iterable[RequestGroup]) -> None:
        """Tell the callers what is new; those that have all of it are served no more."""
        for group in groups:
            if group.finished:
                group.finished_time = time.monotonic()
                del self._groups[group.request_id]
            output = group.output()
            if output is not None:
                group.emit(output)

    def fail(self, group: RequestGroup, error: Exception) -> None:
        """A group is served no more, and its caller is told why."""
        del self._groups[group.request_id]
        for sequence in group.sequences:
            self._sequences.pop(sequence.request.request_id, None)
        group.emit(error)

    def fail_all(self, error: Exception) -> None:
        """No group is served any more."""
        for group in list(self._groups.values()):
            group.emit(error)
        self._groups.clear()
        self._sequences.clear()
