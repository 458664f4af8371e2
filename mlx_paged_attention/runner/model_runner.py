"""ModelRunner: a step plan in, sampled tokens out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.models.seam import PagedLayerCache
from mlx_paged_attention.runner.batch import BatchInput, build_batches, slots_of
from mlx_paged_attention.runner.block_tables import BlockTables
from mlx_paged_attention.runner.decode_step import DecodeStep
from mlx_paged_attention.runner.kv_pool import KernelPool, KVPool
from mlx_paged_attention.runner.layout import Layout
from mlx_paged_attention.runner.model_host import ModelHost
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
    """What the runner remembers of a request between steps, beside its block table."""

    def __init__(self, new: NewRow) -> None:
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        self.sampling = SamplingRow(new.token_ids, new.num_prompt_tokens, new.sampling)


@dataclass(frozen=True)
class ForwardOutput:
    """The logits of one forward.

    Attributes:
        planned: the rows that took part.
        ends: for each of them, where its logits end and those of the next begin.
        logits: those that were wanted, ``[wanted, vocabulary]``.
    """

    planned: Sequence[PlannedRow]
    ends: NDArray[np.int64]
    logits: mx.array

    def __iter__(self) -> Iterator[tuple[PlannedRow, mx.array | None]]:
        """Each row and its wanted logits, ``[wanted, vocabulary]``; ``None`` where there are none."""
        begin = 0
        for row, end in zip(self.planned, self.ends.tolist(), strict=True):
            yield row, self.logits[begin:end] if end > begin else None
            begin = end

    def last(self) -> mx.array:
        """The last logits of each row that samples, ``[sampling rows, vocabulary]``."""
        indices = self.ends[[row.sample for row in self.planned]] - 1
        if len(indices) == self.logits.shape[0]:  # indices ascend: these are all
            return self.logits
        return self.logits[mx.array(indices.astype(np.int32))]


class ModelRunner:
    """Runs steps of one model on one pool. A function of the plans it is given, in order."""

    def __init__(self, host: ModelHost, pool: KVPool, layout: Layout) -> None:
        self._host = host
        self._pool = pool
        self._layout = layout
        self._caches = [PagedLayerCache(layer, host.context, dense=layout.dense) for layer in pool.layers]
        self._rows: dict[str, RunnerRow] = {}
        self._tables = BlockTables()
        self._decode: DecodeStep | None = None
        if layout.compiled:
            assert isinstance(pool, KernelPool)
            self._decode = DecodeStep(host, self._caches, pool)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step: every row's tokens, then one new token for each row that samples."""
        try:
            return self._execute(plan)
        except BaseException:
            self._pool.discard()
            raise

    def _execute(self, plan: StepPlan) -> StepOutput:
        forwards = self.forward(plan)
        sampled = [row.request_id for forward in forwards for row in forward.planned if row.sample]
        tokens: dict[str, tuple[list[int], list[TokenLogprobs] | None]] = {}
        if sampled:
            logits = [f.last() for f in forwards if any(row.sample for row in f.planned)]
            states = [self._rows[request_id].sampling for request_id in sampled]
            pending = launch(logits[0] if len(logits) == 1 else mx.concatenate(logits), states)
            for request_id, state, result in zip(sampled, states, pending.read(), strict=True):
                state.append(result.token_id)
                tokens[request_id] = (
                    [result.token_id],
                    None if result.logprobs is None else [result.logprobs],
                )
        self._pool.flush()
        prompt_logprobs = self._prompt_logprobs(forwards)
        outputs = []
        for row in plan.rows:
            token_ids, logprobs = tokens.get(row.request_id, ([], None))
            of_prompt = prompt_logprobs.get(row.request_id)
            if token_ids or of_prompt is not None:
                outputs.append(RowOutput(row.request_id, token_ids, logprobs, of_prompt))
        return StepOutput(plan.step, outputs)

    def forward(self, plan: StepPlan) -> list[ForwardOutput]:
        """Run the plan's forwards, which are its rows in order."""
        self._admit(plan)
        if self._decode is not None and all(len(row.token_ids) == 1 for row in plan.rows):
            return [self._compiled_forward(self._decode, plan.rows)]
        return [
            self._forward(batch)
            for batch in build_batches(
                plan.rows,
                self._tables,
                self._pool.block_size,
                pack_limit=self._pool.pack_limit if self._layout.pack else 1,
                batch_rows=self._layout.batch_rows,
            )
        ]

    def _admit(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self._rows.pop(request_id, None)
            self._tables.remove(request_id)
        for new in plan.new:
            self._rows[new.request_id] = RunnerRow(new)
            self._tables.add(new.request_id)
        for row in plan.rows:
            self._tables.extend(row.request_id, row.new_block_ids)

    def _forward(self, batch: BatchInput) -> ForwardOutput:
        wanted = [self._wanted(row, *span) for row, span in zip(batch.planned, batch.spans, strict=True)]
        logits = self._host.forward(
            mx.array(batch.tokens), batch.attention, self._caches, mx.array(np.concatenate(wanted))
        )
        return ForwardOutput(batch.planned, np.cumsum([len(indices) for indices in wanted]), logits)

    def _compiled_forward(self, decode: DecodeStep, rows: Sequence[PlannedRow]) -> ForwardOutput:
        """One token of every row; all of their logits are computed, wanted or not."""
        size = self._pool.block_size
        starts = np.array([row.start for row in rows], np.int32)
        tables = self._tables.of([row.request_id for row in rows], int(starts.max()) // size + 1)
        write_from = np.array([row.write_from for row in rows])
        slots = slots_of(starts, tables[np.arange(len(rows)), starts // size], write_from, size)
        tokens = np.array([row.token_ids[0] for row in rows], np.int32)
        return ForwardOutput(rows, np.arange(1, len(rows) + 1), decode(tokens, starts, slots, tables))

    def _wanted(self, row: PlannedRow, begin: int, end: int) -> NDArray[np.int32]:
        """Flat indices of the row's tokens whose logits are needed."""
        first = end - 1 if row.sample else end
        if self._prompt_targets(row):
            first = begin
        return np.arange(first, end, dtype=np.int32)

    def _prompt_targets(self, row: PlannedRow) -> list[int]:
        """The prompt's tokens that this row's logits predict, if their log-probabilities are asked for."""
        state = self._rows[row.request_id]
        if state.sampling.sampling.prompt_logprobs is None:
            return []
        return state.prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]

    def _prompt_logprobs(self, forwards: Sequence[ForwardOutput]) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of prompt tokens, for the rows that ask for them."""
        results: dict[str, list[TokenLogprobs]] = {}
        for forward in forwards:
            if not any(self._prompt_targets(row) for row in forward.planned):
                continue
            for row, logits in forward:
                if targets := self._prompt_targets(row):
                    assert logits is not None
                    top = self._rows[row.request_id].sampling.sampling.prompt_logprobs
                    assert top is not None
                    results[row.request_id] = token_logprobs(logits[: len(targets)], targets, top)
        return results
