"""Forks: requests that are to go on from another's tokens, once those have been computed."""

from dataclasses import dataclass

from mlx_paged_attention.scheduler.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Fork:
    """A request that waits to begin with the blocks of another.

    Attributes:
        num_tokens: how many first tokens the two have in common.
    """

    parent: Request
    child: Request
    num_tokens: int

    @property
    def is_ready(self) -> bool:
        """All that the child begins with has been planned, and is held by its parent."""
        running = self.parent.status is RequestStatus.RUNNING
        return running and self.parent.num_computed_tokens >= self.num_tokens


class Forks:
    """The forks that have not begun, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._forks: dict[str, Fork] = {}

    def add(self, fork: Fork) -> None:
        self._forks[fork.child.request_id] = fork

    def __len__(self) -> int:
        return len(self._forks)

    def discard(self, child: Request) -> bool:
        """Forget a child; whether there was one."""
        return self._forks.pop(child.request_id, None) is not None

    def all(self) -> list[Fork]:
        """In the order in which they were asked for."""
        return list(self._forks.values())

    def ready(self) -> list[Fork]:
        """Those that can begin now."""
        return [fork for fork in self.all() if fork.is_ready]

    def take_orphans(self, parent: Request) -> list[Fork]:
        """The forks of a request that has ended."""
        return self._take([fork for fork in self._forks.values() if fork.parent is parent])

    def _take(self, forks: list[Fork]) -> list[Fork]:
        for fork in forks:
            del self._forks[fork.child.request_id]
        return forks
