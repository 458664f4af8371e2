"""StepDraft: the step under construction."""

from dataclasses import dataclass

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.request_queues import RequestQueues
from mlx_paged_attention.scheduler.step_plan import (
    UNKNOWN_TOKEN,
    NewRow,
    PlannedRow,
    StepPlan,
    TableChange,
)


@dataclass(slots=True)
class _Share:
    """What one request computes in the step; ``write_from`` as in ``PlannedRow``."""

    request: Request
    num_tokens: int
    new_block_ids: list[int]
    write_from: int
    copy: tuple[int, int] | None


class StepDraft:
    """Which requests compute how many tokens in the next step, in the order of its rows.

    Attributes:
        budget: tokens that may still be handed out.
        copied: of a plan, ids of requests whose rows begin in a block that is copied before.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.budget = 0
        self.copied: set[str] = set()
        self._manager = manager
        self._shares: dict[str, _Share] = {}
        self._admitted: list[NewRow] = []

    def __bool__(self) -> bool:
        return bool(self._shares)

    @property
    def requests(self) -> dict[str, Request]:
        """Those that take part, by id."""
        return {key: share.request for key, share in self._shares.items()}

    def add(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: list[int],
        write_from: int,
        *,
        copy: tuple[int, int] | None = None,
        admitted: bool = False,
    ) -> None:
        """Give a request tokens of the budget; its new blocks have been allocated.

        Args:
            copy: a block that it begins with a copy of, and the copy.
            admitted: the runner does not know it.
        """
        self._shares[request.request_id] = _Share(request, num_tokens, new_block_ids, write_from, copy)
        self.budget -= num_tokens
        if admitted:
            self._admitted.append(_new_row(request))

    def strike(self, request: Request) -> None:
        """It takes no part if it did: the blocks that it was to fill stay unwritten."""
        share = self._shares.pop(request.request_id, None)
        if share is not None:
            self._manager.unpublish_from(request.request_id, share.write_from)
            self.budget += share.num_tokens

    def plan(self, step: int, queues: RequestQueues) -> StepPlan:
        """The plan. Its rows count as computed from now on."""
        rows, copies, changes, new = [], [], [], self._admitted
        for share in self._shares.values():
            request, new_block_ids = share.request, share.new_block_ids
            start = request.num_computed_tokens
            end = start + share.num_tokens
            changed = self._manager.take_changes(request.request_id)
            copies += changed.copies
            if queues.enters(request):
                new.append(_new_row(request))
                new_block_ids = self._manager.block_ids(request.request_id)
            elif changed.indices:
                tables = self._manager.tables(request.request_id)
                changes += [
                    TableChange(request.request_id, index, [ids[index] for ids in tables])
                    for index in changed.indices
                ]
            if share.copy is not None:
                copies.append(share.copy)
            if changed.copies or share.copy is not None:
                self.copied.add(request.request_id)
            sample = end >= len(request.token_ids)
            rows.append(
                PlannedRow(
                    request.request_id,
                    request.token_ids[start:end] or [UNKNOWN_TOKEN],
                    start,
                    new_block_ids,
                    share.write_from,
                    sample,
                    *self._manager.states.plan(request.request_id, end),
                )
            )
            request.num_computed_tokens = end
            request.num_samples_in_flight += sample
            request.num_tokens_in_flight += share.num_tokens
        return StepPlan(step, new, rows, queues.take_released(), copies, changes, self._manager.num_blocks)


def _new_row(request: Request) -> NewRow:
    return NewRow(request.request_id, list(request.token_ids), request.num_prompt_tokens, request.sampling)
