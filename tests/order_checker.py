"""Replays the rules by which MLX makes kernels wait for each other on Metal; finds accesses that may overlap.

A ``Recorder`` stands where kernels are made and notes what a program dispatches. Between two of these
kernels lie others, MLX's own, which only make more kernels wait; they are left out. So is the host: what it
waits for between two steps is not reckoned with.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import make

Slots = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Dispatch:
    """A kernel with the buffers it is known to read and make, and the slots of pools that it touches.

    Attributes:
        inputs, outputs: buffers, by address.
        token: the input that is there for the sake of order alone.
        reads, writes: slots, as (pool, slot).
    """

    kernel: str
    inputs: frozenset[int]
    outputs: frozenset[int]
    token: int | None = None
    reads: Slots = frozenset()
    writes: Slots = frozenset()

    def conflicts(self, later: "Dispatch") -> bool:
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)

    def without_token(self) -> "Dispatch":
        return replace(self, token=None, inputs=self.inputs - {self.token})


@dataclass
class Recorder:
    """Makes kernels that note each call and give zeros."""

    dispatches: list[Dispatch] = field(default_factory=list)
    arrays: list[mx.array] = field(default_factory=list)  # kept, so that no address is used twice

    def compile(self, name: str, inputs: Sequence[str], *_: Any) -> Any:
        kernel = name.removeprefix("paged_attention_").rsplit("_", 1)[0]
        names = inputs

        def call(
            *, inputs: list[mx.array], template: Any, output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            given = dict(zip(names, inputs, strict=True))
            made = [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]
            mx.eval(inputs, made)
            self.arrays += [*inputs, *made]
            reads, writes = touched(kernel, given, dict(template))
            self.dispatches.append(
                Dispatch(
                    kernel,
                    frozenset(map(address, inputs)),
                    frozenset(map(address, made)),
                    address(given["after"]) if "after" in given else None,
                    reads,
                    writes,
                )
            )
            return made

        return call


@contextmanager
def recording() -> Iterator[list[Dispatch]]:
    """What is dispatched meanwhile. Compiled functions run each time, so that every step is seen."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "compile_kernel", recorder.compile)
        patch.setattr(KernelLayer, "supports", staticmethod(lambda spec: True))
        make._compiled.cache_clear()
        mx.disable_compile()
        try:
            yield recorder.dispatches
        finally:
            mx.enable_compile()
            make._compiled.cache_clear()


def address(array: mx.array) -> int:
    """Where an array lies: MLX, too, knows a view of an output as that output."""
    return int(np.array(array, copy=False).ctypes.data)


def touched(kernel: str, given: dict[str, mx.array], template: dict[str, Any]) -> tuple[Slots, Slots]:
    """The slots that a call reads and writes."""
    nothing: Slots = frozenset()
    if kernel in ("merge_splits", "join_rows"):
        return nothing, nothing
    keys = given["latents" if kernel == "latent_decode" else "k_pool"]
    pool, size = address(keys), keys.shape[2]

    def of_pool(slots: Any) -> Slots:
        return frozenset((pool, int(slot)) for slot in slots)

    def of_blocks(blocks: mx.array) -> Slots:
        return of_pool(np.add.outer(np.array(blocks) * size, np.arange(size)).ravel())

    def of_positions(table: Any, first: int, last: int) -> Slots:
        at = np.arange(first, last)
        return of_pool(np.array(table)[at // size] * size + at % size)

    if kernel == "write_kv":
        slots = np.array(given["slots"])
        return nothing, of_pool(slots[slots >= size])
    if kernel == "copy_blocks":
        return of_blocks(given["source"]), of_blocks(given["target"])
    if kernel == "gather_kv":
        return of_positions(given["block_table"], *np.array(given["span"])[:2]), nothing
    assert kernel in ("paged_decode", "latent_decode"), f"nobody knows what {kernel} touches"
    tables = np.array(given["block_tables"])
    lens = np.array(given["context_lens"]).reshape(len(tables), -1)
    window = template.get("WINDOW") or lens.max()
    spans = ((row, max(0, length - window), length) for row in range(len(tables)) for length in lens[row])
    return nothing.union(*(of_positions(tables[row], *span) for row, *span in spans)), nothing


def finished_before(dispatches: Sequence[Dispatch], cuts: Sequence[int]) -> list[int]:
    """For each kernel the set (as bits) of those that have surely finished when it starts.

    A program is cut into encoders at ``cuts``. An encoder starts when every encoder that made one of
    its inputs has finished. Within one, kernels run at the same time, except that before a kernel
    with an input that was made, or an output that was read, since the last barrier there is another.
    """
    finished: list[int] = []  # of each kernel: what has finished once its encoder has
    maker: dict[int, int] = {}  # buffer -> first kernel of the encoder that made it
    before: list[int] = []
    for begin, end in itertools.pairwise([0, *cuts, len(dispatches)]):
        members = dispatches[begin:end]
        waited = 0
        for buffer in frozenset().union(*(d.inputs for d in members)):
            if buffer in maker:
                waited |= finished[maker[buffer]]
        made: set[int] = set()
        read: set[int] = set()
        passed = running = 0
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


def conflicts(dispatches: Sequence[Dispatch]) -> list[tuple[int, int]]:
    """Pairs of kernels that touch the same slots, one of them writing."""
    pairs = itertools.combinations(range(len(dispatches)), 2)
    found = [(i, j) for i, j in pairs if dispatches[i].conflicts(dispatches[j])]
    assert found, "a program in which nothing conflicts shows nothing"
    return found


def overlapping(
    dispatches: Sequence[Dispatch], pairs: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> set[tuple[int, int]]:
    """Those of the pairs that may overlap if the program is cut so."""
    before = finished_before(dispatches, cuts)
    return {(i, j) for i, j in pairs if not before[j] >> i & 1}


def hazards(dispatches: Sequence[Dispatch]) -> list[str]:
    """Pairs that conflict and may overlap, in one of many ways to cut the program into encoders."""
    count = len(dispatches)
    rng = random.Random(0)
    cuttings = [[], list(range(1, count))]
    cuttings += [sorted(rng.sample(range(1, count), rng.randrange(1, count))) for _ in range(50)]
    pairs = conflicts(dispatches)
    found = set().union(*(overlapping(dispatches, pairs, cuts) for cuts in cuttings))
    return [f"{i} {dispatches[i].kernel} and {j} {dispatches[j].kernel}" for i, j in sorted(found)]


def unnoticed(dispatches: Sequence[Dispatch]) -> tuple[list[str], int]:
    """Leaves out each kernel's token alone.

    Returns:
        The kernels whose token is missed by nobody although others, on both sides of it, conflict; and
        how many tokens were left out.
    """
    pairs = conflicts(dispatches)
    made: frozenset[int] = frozenset()
    every = list(range(1, len(dispatches)))
    silent, tried = [], 0
    for i, dispatch in enumerate(dispatches):
        if dispatch.token in made and any(a < i <= b for a, b in pairs):
            planted = [*dispatches[:i], dispatch.without_token(), *dispatches[i + 1 :]]
            tried += 1
            if not overlapping(planted, pairs, every):
                silent.append(f"{i} {dispatch.kernel}")
        made |= dispatch.outputs
    return silent, tried
