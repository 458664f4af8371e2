"""describe: what the scheduler has under way, in words, for whoever looks for what hangs."""

from collections.abc import Sequence

from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.step_plan import PlannedRow, StepPlan

# Rows of a plan, and requests of a kind, that are named.
_MOST = 50


def describe(plans: Sequence[StepPlan], running: Sequence[Request], waiting: Sequence[Request]) -> str:
    """The plans in flight and the requests, a line each."""
    lines = [f"steps in flight: {len(plans)}"]
    for plan in plans:
        lines.append(f"  step {plan.step}: {plan.num_tokens} tokens, copies {plan.copies}")
        lines += _some([f"    {_row(row)}" for row in plan.rows])
    for name, requests in (("running", running), ("waiting", waiting)):
        lines.append(f"{name}: {len(requests)}")
        lines += _some([f"  {request}" for request in requests])
    return "\n".join(lines)


def _row(row: PlannedRow) -> str:
    end = row.start + len(row.token_ids)
    return f"{row.request_id}: tokens {row.start} to {end - 1}, new blocks {row.new_block_ids}"


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"    and {len(lines) - _MOST} more"]
