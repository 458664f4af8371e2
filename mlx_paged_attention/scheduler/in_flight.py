"""InFlight: a plan whose output has not come back, and what must go if it never does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.step_plan import PlannedRow, StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class Heir:
    """A request that begins with what a row of a plan in flight has yet to write, or with what precedes it.

    Attributes:
        num_tokens: how many first tokens it has from the row's request.
    """

    request: Request
    row: PlannedRow
    num_tokens: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose output has not come back.

    Attributes:
        requests: of its rows; an id may have been given away again meanwhile.
        published: what it was to write into published blocks: block id and digest.
        copied: ids of requests whose rows begin in a block that is copied before.
        heirs: forks of its rows' requests since it was planned, and their forks.
        void: requests whose rows in it mean nothing: they were built on a step that raised.
    """

    plan: StepPlan
    requests: dict[str, Request]
    published: list[tuple[int, bytes]]
    copied: set[str]
    heirs: list[Heir] = field(default_factory=list)
    void: set[Request] = field(default_factory=set)

    def check(self, output: StepOutput) -> None:
        """Refuses an output that is not this plan's.

        Raises:
            ValueError: a sampled token is missing.
        """
        missing = {row.request_id for row in self.plan.rows if row.sample}
        missing -= {key for key, request in self.requests.items() if request.is_finished}
        missing.difference_update([row.request_id for row in output.rows if row.token_ids or row.failure])
        if missing:
            raise ValueError(f"step {self.plan.step} sampled no token for {sorted(missing)}")

    def end(self) -> None:
        """It is in flight no more."""
        for row in self.plan.rows:
            request = self.requests[row.request_id]
            request.num_samples_in_flight -= row.sample
            request.num_tokens_in_flight -= len(row.token_ids)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """A request was given the blocks of another's first ``num_tokens`` tokens."""
        for row in self.plan.rows:
            if self.requests[row.request_id] is parent:
                self.heirs.append(Heir(child, row, num_tokens))
                return
        for heir in self.heirs[:]:
            if heir.request is parent:
                self.heirs.append(Heir(child, heir.row, min(heir.num_tokens, num_tokens)))

    def publish_states(self, manager: KVCacheManager) -> None:
        """Its rows' states have been computed: others may go on from them."""
        for row in self.plan.rows:
            request = self.requests[row.request_id]
            if request.num_tokens_in_flight or request in self.void:
                continue  # a later step writes to the slot, and may fail
            if request.status is RequestStatus.RUNNING:
                manager.states.publish(request, row.start + len(row.token_ids), row.state_to)


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

    size = manager.block_size
    doomed: dict[str, Request] = {}

    def doom(request: Request, first: int) -> None:
        """Its blocks from index ``first`` on hold garbage."""
        doomed[request.request_id] = request
        garbage.update(block_id for ids in manager.tables(request.request_id) for block_id in ids[first:])
        garbage.discard(0)
        manager.unpublish_from(request.request_id, first * size)

    for row in failed.plan.rows:
        request = failed.requests[row.request_id]
        if request.status is RequestStatus.RUNNING:
            doomed[row.request_id] = request
            if row.write_from < row.start + len(row.token_ids):
                doom(request, row.write_from // size)
    # Of these, the block at an index holds garbage only behind what they have of it.
    spared: dict[Request, int] = {}
    reentered = {new.request_id for flight in later for new in flight.plan.new}
    for heir in failed.heirs:  # whose parents may have ended, or have got blocks of their own
        request, row = heir.request, heir.row
        if request.status is not RequestStatus.RUNNING or request.num_preemptions:
            continue  # it has lost them since
        if row.write_from >= row.start + len(row.token_ids):
            continue
        index = row.write_from // size
        lost = index * size if row.request_id in failed.copied else row.write_from
        # Of a parent that has lost its blocks since there is no telling which of them it gave away.
        if lost < heir.num_tokens or row.request_id in reentered:
            doom(request, index)
        elif heir.num_tokens // size == index:
            spared[request] = index
    for flight in later:
        garbage.update(target for source, target in flight.plan.copies if source in garbage | unwritten)
    spreading = True
    while spreading:
        spreading = False
        for request in running:
            if request.request_id in doomed:
                continue
            tables, at = manager.tables(request.request_id), spared.get(request)
            found = [i for ids in tables for i, block_id in enumerate(ids) if block_id in garbage and i != at]
            if found:
                doom(request, min(found))
                spreading = True
    for flight in later:
        for request in flight.requests.values():
            # Those preempted since may have read garbage, too; they compute everything again.
            if request.status is not RequestStatus.RUNNING or request in doomed.values():
                flight.void.add(request)
    return list(doomed.values())
