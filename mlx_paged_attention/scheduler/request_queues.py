"""RequestQueues: which requests run and which wait."""

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.scheduler.forks import Fork, Forks
from mlx_paged_attention.scheduler.queue import Policy, make_waiting_queue
from mlx_paged_attention.scheduler.request import Request, RequestStatus


class RequestQueues:
    """The living requests of a scheduler, and what the runner has yet to hear of them.

    Args:
        policy, max_overtaken_seconds: as for the scheduler.

    Attributes:
        running: those that hold blocks, in the order in which they were admitted.
        waiting: those that do not, and may be admitted, preempted ones included.
        forks: those that wait for another to compute what they begin with.
        released: ids of requests that the runner may forget.
        num_preemptions: so far.
    """

    def __init__(self, manager: KVCacheManager, policy: Policy, max_overtaken_seconds: float) -> None:
        self.running: list[Request] = []
        self.waiting = make_waiting_queue(policy, manager.estimate_hit, max_overtaken_seconds)
        self.forks = Forks()
        self.released: list[str] = []
        self.num_preemptions = 0
        self._manager = manager
        self._policy = policy
        self._entering: set[str] = set()  # running requests that no plan has named yet
        # Preempted requests whose next token others have yet to choose: nothing is to be computed for them.
        self._undecided: dict[str, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.forks) + len(self._undecided)

    def admit(self, num_cached_tokens: int) -> None:
        """The first waiting request runs from now on, and the plan under construction says so."""
        request = self.waiting.pop()
        self.running.append(request)
        request.admit(num_cached_tokens)

    def start_forks(self, seats: int) -> list[Fork]:
        """Forks whose beginning has been planned get its blocks and run, if no more than ``seats`` do.

        They take no seat from a request that waits and would be served before them, but for beams, without
        which others of their search would wait.

        Returns:
            Those that do.
        """
        started = []
        for fork in self.forks.ready() if len(self.forks) else ():
            child = fork.child
            if len(self.running) >= seats:
                break
            if self.waiting and not (child.is_steered or self._goes_before(child, self.waiting.peek())):
                continue
            self.forks.discard(child)
            if not self._manager.holds_window(fork.parent.request_id, fork.num_tokens - 1):
                self.waiting.add(child)  # the parent has gone on without it, and its windows have moved
                continue
            self._manager.fork(fork.parent.request_id, child.request_id, fork.num_tokens)
            child.admit(min(fork.num_tokens, child.num_tokens - 1))
            self.running.append(child)
            self._entering.add(child.request_id)
            started.append(fork)
        return started

    def _goes_before(self, request: Request, other: Request) -> bool:
        if self._policy == "priority":
            return request.service_key < other.service_key
        return request.arrival_order <= other.arrival_order

    def enters(self, request: Request) -> bool:
        """Whether no plan has named this running request yet, as one does now."""
        if request.request_id not in self._entering:
            return False
        self._entering.remove(request.request_id)
        return True

    def victim(self) -> Request:
        """The running request that loses its blocks first."""
        if self._policy == "priority":
            return max(self.running, key=lambda request: request.service_key)
        return self.running[-1]

    def preempt(self, request: Request) -> None:
        """It loses its blocks and waits, before those that have not run."""
        self._leave(request)
        request.preempt()
        if request.awaits_choice:
            self._set_aside(request)
        else:
            self.waiting.put_back(request)
        self.num_preemptions += 1

    def await_choice(self, request: Request) -> None:
        """What was sampled for a steered request is known, and others choose among it."""
        if request.awaits_choice:  # a step that computed it once more has come back, too
            return
        request.awaits_choice = True
        if request.status is RequestStatus.PREEMPTED:  # since that step was planned
            self.waiting.remove(request)
            self._set_aside(request)

    def end_choice(self, request: Request) -> None:
        """It has its next token."""
        request.awaits_choice = False
        if self._undecided.pop(request.request_id, None) is not None:
            self.waiting.put_back(request)

    def make_way(self) -> bool:
        """Where nothing can be computed though requests wait: one that awaits a choice gives way.

        Those that it is steered with may be among the waiting, and there is no choice before they have run.
        None that has run is computed again before the choice, so that there is an end to this.
        """
        undecided = [request for request in self.running if request.awaits_choice]
        if not undecided or not (self.waiting or self.forks):
            return False
        self.preempt(undecided[-1])
        return True

    def remove(self, request: Request) -> None:
        """It neither runs nor waits any more."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif self._undecided.pop(request.request_id, None) is None and not self.forks.discard(request):
            self.waiting.remove(request)

    def queue_forks_of(self, request: Request) -> None:
        """It computes no more, and its forks have to compute their beginnings themselves."""
        for fork in self.forks.take_orphans(request):
            self.waiting.add(fork.child)

    def take_released(self) -> list[str]:
        """The ids that the runner may forget since the last call."""
        released, self.released = self.released, []
        return released

    def _set_aside(self, request: Request) -> None:
        """Until the choice, nothing is to be computed for it."""
        self._undecided[request.request_id] = request
        self.queue_forks_of(request)

    def _leave(self, request: Request) -> None:
        """It runs no more, and its blocks are free."""
        self.running.remove(request)
        self._manager.free(request.request_id)
        if request.request_id in self._entering:
            self._entering.remove(request.request_id)
        else:
            self.released.append(request.request_id)
