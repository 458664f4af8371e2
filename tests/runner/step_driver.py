"""StepDriver: writes plans by hand for a runner of a tiny model and keeps the books a scheduler would."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_model

from mlx_paged_attention.models.cache_spec import ModelCacheSpec, observe_cache
from mlx_paged_attention.runner.grouping import choose_groups
from mlx_paged_attention.runner.kv_pool import make_pool
from mlx_paged_attention.runner.layout import LAYOUTS, Layout
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.step_plan import NewRow, PlannedRow, StepOutput, StepPlan

BLOCK_SIZE = 16
PACKED, ROWS, ROWS_ALONE, DENSE, ALONE = LAYOUTS


def load_host(directory: Path) -> tuple[ModelHost, ModelCacheSpec]:
    model, _ = load_model(directory)
    host = ModelHost(model)
    return host, observe_cache(model, block_size=BLOCK_SIZE)


class StepDriver:
    """One runner, and for each request its tokens, its blocks and how far it is computed."""

    def __init__(
        self, host: ModelHost, spec: ModelCacheSpec, layout: Layout = PACKED, *, on_host: bool = True
    ) -> None:
        num_blocks = 64
        groups = choose_groups(spec, layout).groups
        pool = make_pool(spec, num_blocks, host=on_host, groups=groups)
        self.runner = ModelRunner(host, spec, pool, layout)
        self._num_groups = len(groups)
        self.tokens: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []
        self._free = [(5 * i) % (num_blocks - 1) + 1 for i in range(num_blocks - 1)]
        assert len(set(self._free)) == num_blocks - 1
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._new: list[NewRow] = []
        self._released: list[str] = []

    def add(
        self, name: str, tokens: Sequence[int], num_prompt_tokens: int | None = None, **sampling: Any
    ) -> None:
        """A request enters, or re-enters with the output it has."""
        self.tokens[name] = list(tokens)
        self._computed[name] = 0
        self._blocks[name] = []
        row = RowSampling(**{"temperature": 0.0, **sampling})
        self._new.append(NewRow(name, list(tokens), num_prompt_tokens or len(tokens), row))

    def release(self, name: str) -> None:
        """A request leaves; its blocks are used again before any other."""
        self._free = self._blocks.pop(name) + self._free
        self._released.append(name)

    def plan(self, **counts: int) -> StepPlan:
        """The next step: so many tokens of each request, in this order."""
        rows = []
        for name, count in counts.items():
            start, tokens, blocks = self._computed[name], self.tokens[name], self._blocks[name]
            end = start + count
            assert end <= len(tokens)
            needed = -(-end // BLOCK_SIZE) * self._num_groups - len(blocks)
            new, self._free = self._free[:needed], self._free[needed:]
            blocks += new
            rows.append(PlannedRow(name, tokens[start:end], start, new, start, end == len(tokens)))
            self._computed[name] = end
        plan = StepPlan(len(self.plans), self._new, rows, self._released)
        self._new, self._released = [], []
        self.plans.append(plan)
        return plan

    def take(self, output: StepOutput) -> StepOutput:
        for row in output.rows:
            self.tokens[row.request_id] += row.token_ids
        return output

    def step(self, **counts: int) -> StepOutput:
        return self.take(self.runner.launch(self.plan(**counts)).read())
