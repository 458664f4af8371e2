"""ModelRunner: a step plan in, sampled tokens out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.models.seam import PagedLayerCache, UnusedCache
from mlx_paged_attention.ops.chunk import MAX_SCORES_BYTES
from mlx_paged_attention.runner.batch import BatchInput, build_batches
from mlx_paged_attention.runner.block_tables import BlockTables
from mlx_paged_attention.runner.compiled_step import CompiledStep
from mlx_paged_attention.runner.kv_pool import KernelPool, KVPool
from mlx_paged_attention.runner.layout import Layout
from mlx_paged_attention.runner.model_host import ModelCache, ModelHost
from mlx_paged_attention.runner.out_of_memory import out_of_memory
from mlx_paged_attention.runner.state_pool import StatePool
from mlx_paged_attention.sampling.grammar import MaskFiller, MatcherSource
from mlx_paged_attention.sampling.logprobs import token_logprobs
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import PendingSample, launch
from mlx_paged_attention.scheduler.step_plan import (
    UNKNOWN_TOKEN,
    NewRow,
    PlannedRow,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity). Numbers too large for the dtype make them so, or "
    "damaged weights: try dtype='float32', or fetch the model again"
)


class RunnerRow:
    """What the runner remembers of a request between steps, beside its block table."""

    def __init__(self, new: NewRow, matchers: MatcherSource | None) -> None:
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        matcher = None
        if new.sampling.grammar is not None:
            assert matchers is not None, "the engine refuses grammars without a tokenizer"
            matcher = matchers.new_matcher(new.sampling.grammar)
        self.sampling = SamplingRow(new.token_ids, new.num_prompt_tokens, new.sampling, matcher)
        self.state_slot = 0  # where its state is; 0 before its first tokens, or without recurrent layers

    def prompt_targets(self, row: PlannedRow) -> list[int]:
        """The prompt's tokens that the row's logits predict, if their log-probabilities are asked for."""
        if self.sampling.sampling.prompt_logprobs is None:
            return []
        return self.prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]


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


@contextmanager
def all_or_nothing(plan: StepPlan, pool: KVPool, states: StatePool) -> Iterator[None]:
    """Leave no trace of a step that fails halfway: what has started ends, the rest is forgotten.

    Raises:
        MemoryError: in place of what MLX raises for want of memory.
    """
    try:
        yield
    except BaseException as error:
        with suppress(Exception):
            mx.synchronize()
        pool.discard()
        states.drop([row.state_to for row in plan.rows])
        if out_of_memory(error):
            mx.clear_cache()
            raise MemoryError(str(error)) from error
        raise


class LaunchedStep:
    """A step that runs, or has run; its tokens may be read once.

    Args:
        rows: of the plan's requests, by id.
        sampled: ids of the requests that ``pending`` samples for, in its order.
        state: of the pool, once the step has run.
    """

    def __init__(
        self,
        pool: KVPool,
        states: StatePool,
        plan: StepPlan,
        forwards: Sequence[ForwardOutput],
        rows: dict[str, RunnerRow],
        sampled: Sequence[str],
        pending: PendingSample | None,
        state: Sequence[mx.array],
    ) -> None:
        self._pool = pool
        self._states = states
        self._plan = plan
        self._forwards = forwards
        self._rows = rows
        self._sampled = sampled
        self._pending = pending
        self._state = state

    def read(self) -> StepOutput:
        """Wait for the step.

        Raises:
            MemoryError: there was no memory for it.
            Exception: MLX's, if the step could not be computed.
        """
        with all_or_nothing(self._plan, self._pool, self._states):
            try:
                return self._read()
            except BaseException:
                # Whoever keeps the exception keeps this object: it must not hold the pool's arrays.
                self._state, self._forwards, self._pending = (), (), None
                raise

    def _read(self) -> StepOutput:
        tokens: dict[str, tuple[list[int], list[TokenLogprobs] | None]] = {}
        failed: dict[str, str] = {}
        by_form: set[str] = set()
        complete: set[str] = set()
        if self._pending is not None:
            for request_id, result in zip(self._sampled, self._pending.read(), strict=True):
                row_sampling = self._rows[request_id].sampling
                grammar = row_sampling.grammar
                failure = None if grammar is None else grammar.failure
                if failure is not None or not result.finite:
                    failed[request_id] = failure or NOT_FINITE
                    if failure is not None:
                        by_form.add(request_id)
                    continue
                row_sampling.append(result.token_id)
                if grammar is not None and grammar.complete:
                    complete.add(request_id)
                tokens[request_id] = (
                    [result.token_id],
                    None if result.logprobs is None else [result.logprobs],
                )
        mx.eval(self._state)  # a step that samples nothing, too, is waited for
        self._pool.flush()
        prompt_logprobs = self._prompt_logprobs()
        outputs = []
        for row in self._plan.rows:
            if row.request_id in failed:
                failure, of_form = failed[row.request_id], row.request_id in by_form
                outputs.append(RowOutput(row.request_id, [], failure=failure, by_form=of_form))
                continue
            token_ids, logprobs = tokens.get(row.request_id, ([], None))
            of_prompt = prompt_logprobs.get(row.request_id)
            if token_ids or of_prompt is not None:
                ends = row.request_id in complete
                outputs.append(RowOutput(row.request_id, token_ids, logprobs, of_prompt, complete=ends))
        return StepOutput(self._plan.step, outputs)

    def _prompt_logprobs(self) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of prompt tokens, for the rows that ask for them."""
        results: dict[str, list[TokenLogprobs]] = {}
        for forward in self._forwards:
            if not any(self._rows[row.request_id].prompt_targets(row) for row in forward.planned):
                continue
            for row, logits in forward:
                state = self._rows[row.request_id]
                if targets := state.prompt_targets(row):
                    assert logits is not None
                    top = state.sampling.sampling.prompt_logprobs
                    assert top is not None
                    results.setdefault(row.request_id, []).extend(
                        token_logprobs(logits[: len(targets)], targets, top)
                    )
        return results


class ModelRunner:
    """Runs steps of one model on one pool. A function of the plans it is given, in order.

    Args:
        spec: what the model keeps; ``pool`` was made for it.
        matchers: for the grammars that rows may have; ``None`` if none may.
    """

    def __init__(
        self,
        host: ModelHost,
        spec: ModelCacheSpec,
        pool: KVPool,
        layout: Layout,
        matchers: MatcherSource | None = None,
    ) -> None:
        self._host = host
        self._matchers = matchers
        self._mask_filler = None if matchers is None else MaskFiller(matchers)
        self._pool = pool
        self._layout = layout
        context, dense, one_row = host.context, layout.dense, not layout.batch_rows
        latent = spec.latents and not dense
        group_of = pool.group_of
        layers = [
            PagedLayerCache(
                layer, context, dense=dense, one_row=one_row, latent=latent, group=group_of[index]
            )
            for index, layer in enumerate(pool.layers)
        ]
        self._states = StatePool([state.num_arrays for state in spec.states])
        unused = UnusedCache(context, dense=dense, one_row=one_row, latent=latent)
        # A model's own attention holds [heads, queries, positions] scores.
        self._most_scores = MAX_SCORES_BYTES // (4 * spec.query_heads) if dense or latent else None
        self._cache = ModelCache(spec.make_cache(layers, self._states.caches, unused), layers)
        self._rows: dict[str, RunnerRow] = {}
        self._windows = [group.window for group in pool.groups]
        self._tables = BlockTables(len(pool.groups))
        # The tokens that the last step sampled, on the device, and each request's place among them.
        self._last: tuple[mx.array | None, dict[str, int]] = (None, {})
        self._new_states: list[mx.array] = []  # stated by the step that is being launched
        self._compiled: CompiledStep | None = None
        if layout.compiled:
            assert isinstance(pool, KernelPool)
            self._compiled = CompiledStep(host, self._cache, pool)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched while the one before it runs, and gains by it."""
        return self._compiled is not None

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        """Start a step: every row's tokens, then one new token for each row that samples.

        A plan for another size of the pool comes when all steps before it have been read.

        Raises:
            PoolMemoryError: the pool cannot grow as planned; nothing has changed.
            MemoryError: there was no memory for it.
            Exception: whatever the model raises.
        """
        if plan.num_blocks not in (0, self._pool.num_blocks):
            self._resize(plan.num_blocks)
        with all_or_nothing(plan, self._pool, self._states):
            try:
                return self._launch(plan)
            except BaseException:
                self._new_states = []
                raise

    def _launch(self, plan: StepPlan) -> "LaunchedStep":
        forwards = self.forward(plan)
        sampled = [row.request_id for forward in forwards for row in forward.planned if row.sample]
        pending = None
        if sampled:
            states = [self._rows[request_id].sampling for request_id in sampled]
            logits = [f.last() for f in forwards if any(row.sample for row in f.planned)]
            masks = None
            if self._mask_filler is not None and any(row.grammar is not None for row in states):
                mx.async_eval(logits)  # masks are filled while these are computed
                masks = self._mask_filler.fill(states)
            pending = launch(logits[0] if len(logits) == 1 else mx.concatenate(logits), states, masks)
            for row in states:
                row.expect()
        state, self._new_states = [*self._pool.state, *self._new_states], []
        mx.async_eval(state, [] if pending is None else pending.arrays)
        token_ids = None if pending is None else pending.token_ids
        self._last = (token_ids, {key: i for i, key in enumerate(sampled)})
        rows = {row.request_id: self._rows[row.request_id] for row in plan.rows}
        return LaunchedStep(self._pool, self._states, plan, forwards, rows, sampled, pending, state)

    def _resize(self, num_blocks: int) -> None:
        if self._compiled is not None:
            self._compiled.forget()
        if num_blocks == 1:  # nobody has a block, nor a state
            self._states.clear()
        mx.eval(self._pool.state)
        self._pool.resize(num_blocks)

    def forward(self, plan: StepPlan) -> list[ForwardOutput]:
        """Run the plan's forwards, which are its rows in order."""
        self._admit(plan)
        return [
            self._forward(batch)
            for batch in build_batches(
                plan.rows,
                self._tables,
                self._pool.block_size,
                pack_limit=self._pool.pack_limit if self._layout.pack else 1,
                batch_rows=self._layout.batch_rows,
                windows=self._windows,
                first_alone=bool(self._states.caches),
                most_scores=self._most_scores,
            )
        ]

    def _admit(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            left = self._rows.pop(request_id, None)
            if left is not None:
                self._new_states += self._states.set_apart(left.state_slot)
            self._tables.remove(request_id)
        for new in plan.new:
            self._rows[new.request_id] = RunnerRow(new, self._matchers)
            self._tables.add(new.request_id)
        for source, target in plan.copies:
            self._pool.copy(source, target)
        for change in plan.changes:
            self._tables.change(change.request_id, change.index, change.block_ids)
        for row in plan.rows:
            self._tables.extend(row.request_id, row.new_block_ids)
            self._rows[row.request_id].state_slot = row.state_to

    def _forward(self, batch: BatchInput) -> ForwardOutput:
        wanted, counts = self._wanted(batch)
        shape = None
        if self._compiled is not None and batch.attention.queries == 1:
            shape = self._compiled.shape_of(batch.attention, len(wanted))
        if self._compiled is not None and shape is not None:
            sampled = self._sampled_tokens(batch, shape.tokens)
            logits = self._compiled(shape, batch.tokens[:, 0], sampled, batch.attention, wanted)
        else:
            tokens = mx.array(batch.tokens)
            sampled = self._sampled_tokens(batch, tokens.size)
            if sampled is not None:
                tokens = mx.where(tokens == UNKNOWN_TOKEN, sampled.reshape(tokens.shape), tokens)
            self._states.load([row.state_from for row in batch.planned])
            logits = self._host.forward(tokens, batch.attention, self._cache, mx.array(wanted))
            self._new_states += self._states.store(
                [row.state_from for row in batch.planned], [row.state_to for row in batch.planned]
            )
        return ForwardOutput(batch.planned, np.cumsum(counts), logits)

    def _sampled_tokens(self, batch: BatchInput, length: int) -> mx.array | None:
        """int32 ``[length]`` with the token the last step sampled in the place of each unknown one."""
        token_ids, index = self._last
        sources = np.zeros(length, np.int32)
        unknown = False
        for row, (begin, _) in zip(batch.planned, batch.spans, strict=True):
            if row.token_ids[0] == UNKNOWN_TOKEN:
                sources[begin] = index[row.request_id]
                unknown = True
        if not unknown:
            return None
        assert token_ids is not None
        return token_ids[mx.array(sources)]

    def _wanted(self, batch: BatchInput) -> tuple[NDArray[np.int32], list[int]]:
        """Flat indices of the tokens whose logits are needed, and how many they are of each row."""
        indices: list[int] = []
        counts = []
        for row, (begin, end) in zip(batch.planned, batch.spans, strict=True):
            first = end - 1 if row.sample else end
            if self._rows[row.request_id].prompt_targets(row):
                first = begin
            indices += range(first, end)
            counts.append(end - first)
        return np.array(indices, np.int32), counts
