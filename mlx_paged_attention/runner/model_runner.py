"""ModelRunner: a step plan in, sampled tokens out."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.head import select_rows_in_head, selected_logits
from mlx_paged_attention.models.seam import PagedLayerCache, rebind_attention
from mlx_paged_attention.runner.batch import BatchInput, build_batches
from mlx_paged_attention.runner.kv_pool import KVPool
from mlx_paged_attention.runner.layout import Layout
from mlx_paged_attention.sampling.logprobs import token_logprobs
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import launch
from mlx_paged_attention.scheduler.step_plan import (
    NewRow,
    PlannedRow,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)


class RunnerRow:
    """What the runner remembers of a request between steps."""

    def __init__(self, new: NewRow) -> None:
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        self.sampling = SamplingRow(new.token_ids, new.num_prompt_tokens, new.sampling)
        self.num_blocks = 0
        self.table: NDArray[np.int32] = np.zeros(16, np.int32)

    def extend_table(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self.table):
            self.table = np.concatenate([self.table, np.zeros(max(end, len(self.table)), np.int32)])
        self.table[self.num_blocks : end] = block_ids
        self.num_blocks = end


class ModelHost:
    """A model prepared for the seam: its head selects rows, its attention finds paged caches."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.context = ForwardContext()
        select_rows_in_head(model, self.context)
        rebind_attention()


class ModelRunner:
    """Runs steps of one model on one pool. A function of the plans it is given, in order."""

    def __init__(self, host: ModelHost, pool: KVPool, layout: Layout) -> None:
        self._host = host
        self._pool = pool
        self._layout = layout
        self._caches = [PagedLayerCache(layer, host.context, dense=layout.dense) for layer in pool.layers]
        self._rows: dict[str, RunnerRow] = {}

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step: every row's tokens, then one new token for each row that samples."""
        forwards = self.forward(plan)
        sampled = [
            (row.request_id, logits[-1:]) for row, logits in forwards if logits is not None and row.sample
        ]
        tokens: dict[str, tuple[list[int], list[TokenLogprobs] | None]] = {}
        if sampled:
            states = [self._rows[request_id].sampling for request_id, _ in sampled]
            pending = launch(mx.concatenate([logits for _, logits in sampled]), states)
            for (request_id, _), state, result in zip(sampled, states, pending.read(), strict=True):
                state.append(result.token_id)
                tokens[request_id] = (
                    [result.token_id],
                    None if result.logprobs is None else [result.logprobs],
                )
        mx.eval([layer.state for layer in self._pool.layers])
        outputs = []
        for row, logits in forwards:
            token_ids, logprobs = tokens.get(row.request_id, ([], None))
            prompt_logprobs = self._prompt_logprobs(row, logits)
            if token_ids or prompt_logprobs is not None:
                outputs.append(RowOutput(row.request_id, token_ids, logprobs, prompt_logprobs))
        return StepOutput(plan.step, outputs)

    def forward(self, plan: StepPlan) -> list[tuple[PlannedRow, mx.array | None]]:
        """Run the plan's forwards; the wanted logits of each row, ``[wanted, vocabulary]``."""
        self._admit(plan)
        tables = {row.request_id: self._rows[row.request_id].table for row in plan.rows}
        results: list[tuple[PlannedRow, mx.array | None]] = []
        for batch in build_batches(
            plan.rows,
            tables,
            self._pool.block_size,
            pack_limit=self._pool.pack_limit if self._layout.pack else 1,
            batch_rows=self._layout.batch_rows,
        ):
            results.extend(self._forward(batch))
        return results

    def _admit(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self._rows.pop(request_id, None)
        for new in plan.new:
            self._rows[new.request_id] = RunnerRow(new)
        for row in plan.rows:
            self._rows[row.request_id].extend_table(row.new_block_ids)

    def _forward(self, batch: BatchInput) -> list[tuple[PlannedRow, mx.array | None]]:
        wanted = [self._wanted(row, *span) for row, span in zip(batch.planned, batch.spans, strict=True)]
        selected = np.concatenate(wanted)
        logits = self._call_model(batch, selected)
        results: list[tuple[PlannedRow, mx.array | None]] = []
        begin = 0
        for row, indices in zip(batch.planned, wanted, strict=True):
            end = begin + len(indices)
            results.append((row, logits[begin:end] if end > begin else None))
            begin = end
        return results

    def _call_model(self, batch: BatchInput, selected: NDArray[np.int32]) -> mx.array:
        context = self._host.context
        context.batch = batch.attention
        context.selected = mx.array(selected)
        try:
            output: Any = self._host.model(mx.array(batch.tokens), cache=self._caches)
            logits = selected_logits(output, context, batch.tokens.size)
        finally:
            context.batch = context.selected = None
            # A list, not a generator: every cache must be settled.
            settled = [cache.settle() for cache in self._caches]
        assert all(settled), f"layer {settled.index(False)} fetched keys but never attended with them"
        return logits

    def _wanted(self, row: PlannedRow, begin: int, end: int) -> NDArray[np.int32]:
        """Flat indices of the row's tokens whose logits are needed."""
        state = self._rows[row.request_id]
        first = end - 1 if row.sample else end
        if state.sampling.sampling.prompt_logprobs is not None and row.start + 1 < len(state.prompt):
            first = begin
        return np.arange(first, end, dtype=np.int32)

    def _prompt_logprobs(self, row: PlannedRow, logits: mx.array | None) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt tokens that this row's logits predict."""
        state = self._rows[row.request_id]
        top = state.sampling.sampling.prompt_logprobs
        targets = state.prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
        if top is None or logits is None or not targets:
            return None
        return token_logprobs(logits[: len(targets)], targets, top)
