"""StepLimit: how much a step may compute, after one has found no memory."""

from mlx_paged_attention.scheduler.step_plan import PlannedRow, StepPlan

# Steps that must end well before the limit is doubled again.
CALM_STEPS = 64


class StepLimit:
    """Most tokens, and so most requests, of a step; ``None`` as long as memory has sufficed.

    It is halved whenever a step fails for want of memory, and doubled after a while without such a failure.

    Args:
        most: tokens from which on there is no need for a limit.
    """

    def __init__(self, most: int) -> None:
        self.tokens: int | None = None
        self._most = most
        self._calm = 0
        self._failed: tuple[str, int] | None = None  # the last step of one token: whose, and up to where

    def is_hopeless(self, plan: StepPlan) -> bool:
        """Of a step that found no memory: none is smaller, and it has failed before.

        Its request has got no further meanwhile, so that it would start again and fail here for ever.
        """
        return plan.num_tokens == 1 and self._failed == _aim(plan)

    def apply(self, count: int) -> int:
        """``count``, or less."""
        return count if self.tokens is None else min(count, self.tokens)

    def lower(self, failed: StepPlan) -> int:
        """A step found no memory; how many tokens the next one may compute, at least 1."""
        if failed.num_tokens == 1:
            self._failed = _aim(failed)
        self.tokens = max(1, self.apply(failed.num_tokens) // 2)
        self._calm = 0
        return self.tokens

    def forget(self, request_id: str) -> None:
        """The request has ended; another may be named like it."""
        if self._failed is not None and self._failed[0] == request_id:
            self._failed = None

    def step_ended(self, plan: StepPlan) -> None:
        """A step has found its memory."""
        if self.tokens is None:
            return
        if self._failed is not None:
            request_id, end = self._failed
            if any(row.request_id == request_id and _end(row) >= end for row in plan.rows):
                self._failed = None
        self._calm += 1
        if self._calm == CALM_STEPS:
            self._calm = 0
            self.tokens = 2 * self.tokens if 2 * self.tokens < self._most else None


def _aim(plan: StepPlan) -> tuple[str, int]:
    """Of a step of one row: whose it is, and up to where it computes it."""
    (row,) = plan.rows
    return row.request_id, _end(row)


def _end(row: PlannedRow) -> int:
    return row.start + len(row.token_ids)
