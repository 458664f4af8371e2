"""A runner without a model that checks every step it is given, and helpers to make its requests.

What it stores in a slot names the whole token prefix up to there, as a key or value would depend on it.
So a row that reads a slot which was overwritten, not yet written or somebody else's fails at once. The
states of recurrent layers are the same names, one per slot of theirs. Layer groups share the slots, and
put their number into what they store; of what lies behind its window a group reads nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_paged_attention.cache.block_hash import root_hash
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN, PlannedRow, RowOutput, StepOutput, StepPlan

VOCAB_SIZE = 250


def make_manager(num_blocks: int, block_size: int = 16, **options: Any) -> KVCacheManager:
    options = {"enable_caching": True, "root_hash": root_hash("test"), **options}
    return KVCacheManager(num_blocks, block_size, **options)


def make_request(request_id: str, prompt: Sequence[int], **options: Any) -> Request:
    sampling = RowSampling(temperature=0.0, prompt_logprobs=options.pop("prompt_logprobs", None))
    return Request(request_id, prompt, sampling, **{"max_tokens": 16, **options})


def varied_prompt(length: int, seed: int) -> list[int]:
    return [(7 * i + 13 * seed + i * i) % VOCAB_SIZE + 3 for i in range(length)]


def reply(plan: StepPlan, tokens: dict[str, list[int]] | None = None) -> StepOutput:
    """An output with the given tokens per request, or token 7 for every row that samples."""
    rows = [
        RowOutput(row.request_id, (tokens or {}).get(row.request_id, [7])) for row in plan.rows if row.sample
    ]
    return StepOutput(plan.step, rows)


def _extend(state: int, token: int) -> int:
    return hash((state, token))


def expected_output(prompt: Iterable[int], length: int) -> list[int]:
    """What the fake runner makes of a prompt when it runs alone."""
    state = 0
    for token in prompt:
        state = _extend(state, token)
    output = []
    for _ in range(length):
        output.append(state % VOCAB_SIZE)
        state = _extend(state, output[-1])
    return output


class FakeRunner:
    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self._size = block_size
        self._windows = windows
        self._tables: dict[str, list[list[int]]] = {}
        self._states: dict[str, list[int]] = {}
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._recurrent: dict[int, int] = {}
        self._failed: set[str] = set()
        self._too_early: set[tuple[int, str]] = set()
        self.num_blocks = 0  # 0: no plan has said
        self.sampled: dict[str, int] = {}  # by the last step
        self._sampled_before: dict[str, int] = {}

    def run(self, plan: StepPlan) -> StepOutput:
        self._enter(plan)
        if not plan.rows:
            assert plan.num_blocks
            return StepOutput(plan.step, [])
        self._sampled_before, self.sampled = self.sampled, {}
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        written: set[tuple[int, int]] = set()
        outputs = []
        for row in plan.rows:
            tables, states = self._tables[row.request_id], self._states[row.request_id]
            self._append(row)
            del states[row.start :]
            assert len(states) == row.start, f"{row.request_id} leaves a gap"
            for token in self._known(row):
                states.append(_extend(states[-1] if states else 0, token))
            if row.request_id in self._failed:
                # Whoever takes this token has a wrong answer.
                outputs.append(self._output(row, (states[-1] + 1) % VOCAB_SIZE))
                continue
            if row.state_to:
                assert (row.state_from == 0) == (row.start == 0)
                before = states[row.start - 1] if row.start else None
                assert self._recurrent.get(row.state_from) == before, f"{row.request_id}: another's state"
                self._recurrent[row.state_to] = states[-1]
            for group, table in enumerate(tables):
                for position in range(max(row.start, row.write_from), len(states)):
                    slot = self._slot(table, position)
                    assert slot[0] != 0
                    assert slot not in written, f"{slot} is written twice in one step"
                    written.add(slot)
                    self._slots[slot] = (group, states[position])
            for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
                first = 0 if window is None else max(0, row.start - window + 1)
                for position in range(first, len(states)):
                    found = self._slots.get(self._slot(table, position))
                    assert found == (group, states[position]), (
                        f"{row.request_id} reads another's slot at {position} in group {group}"
                    )
            outputs.append(self._output(row, states[-1] % VOCAB_SIZE))
        return StepOutput(plan.step, outputs)

    def fail(self, plan: StepPlan) -> None:
        """The step breaks off halfway: its slots hold garbage, as do the blocks that it was to copy to."""
        self._enter(plan)
        for _, target in plan.copies:
            self._slots.update({(target, offset): (-1, -1) for offset in range(self._size)})
        self._sampled_before, self.sampled = self.sampled, {}
        for row in plan.rows:
            self._append(row)
            del self._states[row.request_id][row.start :]
            for token in self._known(row):
                states = self._states[row.request_id]
                states.append(_extend(states[-1] if states else 0, token))
            self.sampled[row.request_id] = 0
            if row.state_to:
                self._recurrent[row.state_to] = -1
            for table in self._tables[row.request_id]:
                for position in range(max(row.start, row.write_from), row.start + len(row.token_ids)):
                    self._slots[self._slot(table, position)] = (-1, -1)

    def forget(self, request_ids: Iterable[str], planned: Iterable[StepPlan] = ()) -> None:
        """Rows of these requests are garbage until they enter again, and so are their tokens.

        Args:
            planned: steps that were planned before; entering with one of these is too early.
        """
        ids = set(request_ids)
        self._failed.update(ids)
        for plan in planned:
            self._too_early.update((plan.step, new.request_id) for new in plan.new if new.request_id in ids)

    def _known(self, row: PlannedRow) -> list[int]:
        if UNKNOWN_TOKEN not in row.token_ids:
            return row.token_ids
        assert row.token_ids == [UNKNOWN_TOKEN]
        return [self._sampled_before[row.request_id]]

    def _output(self, row: PlannedRow, token: int) -> RowOutput:
        if row.sample:
            self.sampled[row.request_id] = token
        return RowOutput(row.request_id, [token] if row.sample else [])

    def _enter(self, plan: StepPlan) -> None:
        if plan.num_blocks:
            self.num_blocks = plan.num_blocks
            self._slots = {slot: value for slot, value in self._slots.items() if slot[0] < plan.num_blocks}
            new = [block for row in plan.rows for block in row.new_block_ids]
            assert max(new, default=0) < plan.num_blocks, "a block that is not there"
        for source, target in plan.copies:
            for offset in range(self._size):
                self._slots[target, offset] = self._slots.get((source, offset), (-1, -1))
        for request_id in plan.released:
            del self._tables[request_id], self._states[request_id]
        for new in plan.new:
            assert new.request_id not in self._tables
            if (plan.step, new.request_id) not in self._too_early:
                self._failed.discard(new.request_id)
            self._tables[new.request_id] = [[] for _ in self._windows]
            row = next(row for row in plan.rows if row.request_id == new.request_id)
            assert row.token_ids == new.token_ids[row.start : row.start + len(row.token_ids)]
            states: list[int] = []
            for token in new.token_ids[: row.start]:
                states.append(_extend(states[-1] if states else 0, token))
            self._states[new.request_id] = states
        for change in plan.changes:
            for table, block_id in zip(self._tables[change.request_id], change.block_ids, strict=True):
                table[change.index] = block_id

    def _append(self, row: PlannedRow) -> None:
        tables = self._tables[row.request_id]
        count = len(row.new_block_ids) // len(tables)
        assert len(row.new_block_ids) == count * len(tables)
        for group, table in enumerate(tables):
            table += row.new_block_ids[group * count : (group + 1) * count]

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self._size], position % self._size
