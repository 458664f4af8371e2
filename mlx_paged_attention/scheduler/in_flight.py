"""InFlight: a plan whose output has not come back, and what must go if it never does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose output has not come back.

    Attributes:
        requests: of its rows; an id may have been given away again meanwhile.
        published: what it was to write into published blocks: block id and digest.
        void: requests whose rows in it mean nothing: they were built on a step that raised.
    """

    plan: StepPlan
    requests: dict[str, Request]
    published: list[tuple[int, bytes]]
    void: set[Request] = field(default_factory=set)

    def end(self) -> None:
        """It is in flight no more."""
        for row in self.plan.rows:
            self.requests[row.request_id].num_samples_in_flight -= row.sample

    def publish_states(self, manager: KVCacheManager) -> None:
        """Its rows' states have been computed: others may go on from them."""
        for row in self.plan.rows:
            request = self.requests[row.request_id]
            if request.status is RequestStatus.RUNNING and request not in self.void:
                manager.publish_state(request, row.start + len(row.token_ids), row.state_to)


def unpublish_failed(
    manager: KVCacheManager, failed: InFlight, later: Sequence[InFlight], running: Sequence[Request]
) -> list[Request]:
    """Make unfindable whatever a step that raised was to write.

    Args:
        later: plans in flight since, which may have built on it.
        running: every running request.

    Returns:
        The requests whose blocks hold garbage: those of the step, and those that found such blocks.
    """
    unwritten = {block_id for block_id, _ in failed.published}
    garbage = {block_id for block_id, key in failed.published if manager.is_published(block_id, key)}
    manager.unpublish(list(garbage))
    for flight in later:
        # What they publish loses its sharing, right or wrong.
        manager.unpublish([block for block, key in flight.published if manager.is_published(block, key)])

    doomed: dict[str, Request] = {}
    for row in failed.plan.rows:
        request = failed.requests[row.request_id]
        if request.status is RequestStatus.RUNNING:
            doomed[row.request_id] = request
            if row.write_from < row.start + len(row.token_ids):
                garbage.update(manager.block_ids(row.request_id)[row.write_from // manager.block_size :])
                manager.unpublish_from(row.request_id, row.write_from)
    for flight in later:
        garbage.update(target for source, target in flight.plan.copies if source in garbage | unwritten)
    spreading = True
    while spreading:
        spreading = False
        for request in running:
            if request.request_id in doomed:
                continue
            block_ids = manager.block_ids(request.request_id)
            first = next((i for i, block_id in enumerate(block_ids) if block_id in garbage), None)
            if first is not None:
                doomed[request.request_id] = request
                garbage.update(block_ids[first:])
                manager.unpublish_from(request.request_id, first * manager.block_size)
                spreading = True
    for flight in later:
        for request in flight.requests.values():
            # Those preempted since may have read garbage, too; they compute everything again.
            if request.status is not RequestStatus.RUNNING or request in doomed.values():
                flight.void.add(request)
    return list(doomed.values())
