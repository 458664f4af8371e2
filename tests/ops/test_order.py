"""Order: everything that touches the same slots of a pool happens in the order in which it was stated.

MLX does not know that kernels write into the pool, so nothing but the tokens orders them. These tests
record what a program dispatches, replay the rules by which MLX makes one kernel wait for another on
Metal, however it cuts the program into encoders, and look for accesses that may overlap. CUDA cannot
show such hazards: there kernels run in the order of one stream.
"""

import itertools
import random
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import make
from mlx_paged_attention.ops.kernels.order import Order, no_token

BLOCK_SIZE = 8


@dataclass(frozen=True)
class Dispatch:
    """A kernel with the arrays it is known to read and make, and the slots of pools that it touches."""

    kernel: str
    inputs: frozenset[int]
    outputs: frozenset[int]
    reads: frozenset[tuple[int, int]] = frozenset()
    writes: frozenset[tuple[int, int]] = frozenset()

    def conflicts(self, later: "Dispatch") -> bool:
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


@dataclass
class Recorder:
    """Stands where kernels are made; notes each call and computes nothing.

    Attributes:
        forgetful: kernels whose token is left out.
    """

    forgetful: frozenset[str] = frozenset()
    dispatches: list[Dispatch] = field(default_factory=list)
    arrays: list[mx.array] = field(default_factory=list)  # kept, so that no id is used twice

    def compile(self, name, inputs, outputs, body, mutable):
        kernel = name.removeprefix("paged_attention_").rsplit("_", 1)[0]

        def call(*, inputs: list, template, output_shapes, output_dtypes, **_):
            given = dict(zip(names, inputs, strict=True))
            made = [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]
            self.arrays += [*inputs, *made]
            reads, writes = touched(kernel, given, dict(template))
            if kernel in self.forgetful:
                del given["after"]
            known = frozenset(map(id, given.values()))
            self.dispatches.append(Dispatch(kernel, known, frozenset(map(id, made)), reads, writes))
            return made

        names = inputs
        return call


def touched(kernel, given, template):
    """The slots, as (pool, slot), that a call reads and writes."""

    def of_pool(slots):
        return frozenset((id(given["k_pool"]), int(slot)) for slot in slots)

    def of_blocks(blocks):
        return of_pool(np.add.outer(np.array(blocks) * BLOCK_SIZE, np.arange(BLOCK_SIZE)).ravel())

    def of_positions(table, first, last):
        at = np.arange(first, last)
        return of_pool(np.array(table)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)

    nothing = frozenset()
    if kernel == "write_kv":
        slots = np.array(given["slots"])
        return nothing, of_pool(slots[slots >= BLOCK_SIZE])
    if kernel == "copy_blocks":
        return of_blocks(given["source"]), of_blocks(given["target"])
    if kernel == "gather_kv":
        return of_positions(given["block_table"], *np.array(given["span"])[:2]), nothing
    if kernel == "paged_decode":
        tables = np.array(given["block_tables"])
        lens = np.array(given["context_lens"]).reshape(len(tables), -1)
        window = template["WINDOW"] or lens.max()
        spans = ((row, max(0, length - window), length) for row in range(len(tables)) for length in lens[row])
        return nothing.union(*(of_positions(tables[row], *span) for row, *span in spans)), nothing
    assert kernel == "merge_splits", f"nobody knows what {kernel} touches"
    return nothing, nothing


def finished_before(dispatches, cuts):
    """For each kernel the set (as bits) of those that have surely finished when it starts.

    A program is cut into encoders at ``cuts``. An encoder starts when every encoder that made one of
    its inputs has finished. Within one, kernels run at the same time, except that before a kernel
    with an input that was made, or an output that was read, since the last barrier there is another.
    """
    finished = []  # of each kernel: what has finished once its encoder has
    maker = {}  # array -> first kernel of the encoder that made it
    before = []
    for begin, end in itertools.pairwise([0, *cuts, len(dispatches)]):
        members = dispatches[begin:end]
        waited = 0
        for array in frozenset().union(*(d.inputs for d in members)):
            if array in maker:
                waited |= finished[maker[array]]
        made, read, passed, running = set(), set(), 0, 0
        for i, dispatch in enumerate(members, begin):
            if dispatch.inputs & made or dispatch.outputs & read:
                passed |= running
                made, read, running = set(), set(), 0
            before.append(waited | passed)
            made |= dispatch.outputs
            read |= dispatch.inputs
            running |= 1 << i
        whole = waited | passed | running
        for dispatch in members:
            finished.append(whole)
            maker.update(dict.fromkeys(dispatch.outputs, begin))
    return before


def hazards(dispatches):
    """Pairs of kernels that touch the same slots, one of them writing, and may overlap."""
    count = len(dispatches)
    rng = random.Random(0)
    cuttings = [[], list(range(1, count))]
    cuttings += [sorted(rng.sample(range(1, count), rng.randrange(1, count))) for _ in range(50)]
    pairs = [
        (i, j) for i, j in itertools.combinations(range(count), 2) if dispatches[i].conflicts(dispatches[j])
    ]
    assert pairs, "a program in which nothing conflicts shows nothing"
    found = set()
    for cuts in cuttings:
        before = finished_before(dispatches, cuts)
        found |= {(i, j) for i, j in pairs if not before[j] >> i & 1}
    return [f"{i} {dispatches[i].kernel} and {j} {dispatches[j].kernel}" for i, j in sorted(found)]


# ---- Programs


class Model:
    """Two layers on kernels, one with a window, and nothing else."""

    def __init__(self, layers=2):
        self.order = Order()
        planes = tuple(Plane(name, "float32", (2, BLOCK_SIZE, 16)) for name in "kv")
        self.layers = [
            KernelLayer(LayerKVSpec(planes, 9 if i % 2 else None), 20, self.order) for i in range(layers)
        ]

    def forward(self, starts, queries, tables):
        """Tokens at ``starts .. starts + queries - 1`` of sequences with these blocks."""
        starts = np.array(starts, np.int32)
        width = max(map(len, tables))
        tables = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
        at = starts[:, None] + np.arange(queries)
        slots = np.take_along_axis(tables, at // BLOCK_SIZE, axis=1) * BLOCK_SIZE + at % BLOCK_SIZE
        batch = AttentionBatch(starts, queries, slots.reshape(-1).astype(np.int64), tables, BLOCK_SIZE)
        q, kv = (mx.zeros((len(starts), heads, queries, 16)) for heads in (4, 2))
        for layer in self.layers:
            layer.attend(q, kv, kv, batch, scale=1.0)

    def copy(self, source, target):
        for layer in self.layers:
            layer.copy(mx.array([source], mx.int32), mx.array([target], mx.int32))


def decode_steps(model):
    for step in range(10):
        model.forward([5 + step, 11 + step], 1, [[1, 2], [3, 4, 5]])


def recycled_blocks(model):
    model.forward([6], 1, [[1]])
    model.forward([0], 8, [[1]])  # the first sequence has ended, its block is another's


def copy_on_write(model):
    model.forward([0], 5, [[1]])
    model.copy(1, 2)  # a fork: both go on, each in a block of its own
    model.forward([5, 5], 1, [[1], [2]])


def a_prompt_in_chunks(model):
    model.forward([0], 24, [[1, 2, 3, 4, 5]])
    model.forward([24], 16 + 1, [[1, 2, 3, 4, 5, 6]])


def shared_prefix_in_one_step(model):
    model.forward([0], 16, [[1, 2]])  # a step of two forwards: the second reads what the first writes
    model.forward([16], 1, [[1, 2, 3]])


PROGRAMS = [decode_steps, recycled_blocks, copy_on_write, a_prompt_in_chunks, shared_prefix_in_one_step]


def record(monkeypatch, program, forgetful=()):
    recorder = Recorder(frozenset(forgetful))
    monkeypatch.setattr(make, "compile_kernel", recorder.compile)
    make._compiled.cache_clear()
    try:
        program(Model())
    finally:
        make._compiled.cache_clear()
    return recorder.dispatches


@pytest.mark.parametrize("program", PROGRAMS)
def test_accesses_to_the_same_slots_never_overlap(monkeypatch, program):
    assert hazards(record(monkeypatch, program)) == []


@pytest.mark.parametrize(
    ("program", "kernel"),
    [
        (decode_steps, "paged_decode"),
        (recycled_blocks, "write_kv"),
        (copy_on_write, "copy_blocks"),
        (copy_on_write, "write_kv"),
        (a_prompt_in_chunks, "gather_kv"),
        (shared_prefix_in_one_step, "paged_decode"),
    ],
)
def test_a_token_left_out_is_found(monkeypatch, program, kernel):
    found = hazards(record(monkeypatch, program, [kernel]))
    assert any(kernel in pair for pair in found)


def test_a_token_lost_between_two_forwards_is_found(monkeypatch):
    def program(model):
        model.forward([0], 8, [[1]])
        model.order.token = no_token()
        model.forward([8], 1, [[1, 2]])

    assert hazards(record(monkeypatch, program))


def test_a_barrier_orders_only_what_was_made_in_the_encoder():
    first, second, third = (
        Dispatch("a", frozenset(), frozenset({1})),
        Dispatch("b", frozenset({1}), frozenset({2})),
        Dispatch("c", frozenset(), frozenset({3})),
    )
    assert finished_before([first, second, third], []) == [0, 0b1, 0b1]
    assert finished_before([first, third, second], []) == [0, 0, 0b11]
    assert finished_before([first, third, second], [1, 2]) == [0, 0, 0b1]
    assert finished_before([first, third, second], [2]) == [0, 0, 0b11]
