"""The bugs that paged attention kernels have had, planted in a small one of the usual shape.

The pool is larger than 2³² elements, and the slots past the context hold NaN: what each bug touches is there
to be noticed.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .buffers import SparseArray
from .conditions import STRICT, Conditions
from .custom_kernel import metal_kernel
from .errors import KernelError

BLOCKS, BLOCK_SIZE, DIM, CONTEXT = 2**22 + 8, 16, 64, 41
TABLE = [2**22 + 3, 2, 2**21 + 5]

SOURCE = """
    constexpr int PER_LANE = DIM / 32, SIMDGROUPS = 4;
    const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
    threadgroup float maxima[SIMDGROUPS], sums[SIMDGROUPS], outputs[SIMDGROUPS * DIM];

    float query[PER_LANE], acc[PER_LANE];
    for (int e = 0; e < PER_LANE; e++) {
        query[e] = q[lane * PER_LANE + e];
        acc[e] = 0.0f;
    }
    float running_max = -INFINITY, running_sum = 0.0f;
    for (int t = sg; t < CONTEXT; t += SIMDGROUPS) {
        const size_t block = size_t(table[t / BLOCK_SIZE]);
        const size_t at = (block * BLOCK_SIZE + t % BLOCK_SIZE) * DIM + lane * PER_LANE;
        float score = 0.0f;
        for (int e = 0; e < PER_LANE; e++) score += query[e] * float(keys[at + e]);
        for (ushort mask = 16; mask > 0; mask /= 2) score += simd_shuffle_xor(score, mask);
        const float new_max = max(running_max, score);
        const float kept = fast::exp2(running_max - new_max), weight = fast::exp2(score - new_max);
        running_sum = running_sum * kept + weight;
        for (int e = 0; e < PER_LANE; e++) acc[e] = acc[e] * kept + weight * float(values[at + e]);
        running_max = new_max;
    }
    if (lane == 0) {
        maxima[sg] = running_max;
        sums[sg] = running_sum;
    }
    for (int e = 0; e < PER_LANE; e++) outputs[sg * DIM + lane * PER_LANE + e] = acc[e];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float all_max = maxima[0], all_sum = 0.0f;
    for (int s = 1; s < SIMDGROUPS; s++) all_max = max(all_max, maxima[s]);
    for (int s = 0; s < SIMDGROUPS; s++) all_sum += sums[s] * fast::exp2(maxima[s] - all_max);
    for (uint d = thread_position_in_threadgroup.x; d < DIM; d += 32 * SIMDGROUPS) {
        float o = 0.0f;
        for (int s = 0; s < SIMDGROUPS; s++) o += outputs[s * DIM + d] * fast::exp2(maxima[s] - all_max);
        out[d] = o / all_sum;
    }
"""

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BUGS = {
    "no barrier before the merge": (BARRIER, ""),
    "a barrier of the simdgroup before the merge": (BARRIER, BARRIER.replace("threadgroup_b", "simdgroup_b")),
    "a lane mask that starts too low": ("mask = 16", "mask = 8"),
    "a lane mask that ends too early": ("mask > 0", "mask > 1"),
    "a lane mask past the simdgroup": ("mask = 16", "mask = 32"),
    "the block before": ("table[t / BLOCK_SIZE]", "table[(t - 1) / BLOCK_SIZE]"),
    "the block after": ("table[t / BLOCK_SIZE]", "table[(t + 1) / BLOCK_SIZE]"),
    "one token too many": ("t < CONTEXT", "t <= CONTEXT"),
    "one token too few": ("t < CONTEXT", "t < CONTEXT - 1"),
    "an unsigned offset that wraps": (
        "const size_t block = size_t(table[t / BLOCK_SIZE]);",
        "const uint block = table[t / BLOCK_SIZE];",
    ),
    "a signed offset that overflows": (
        "const size_t block = size_t(table[t / BLOCK_SIZE]);",
        "const int block = table[t / BLOCK_SIZE];",
    ),
    "an offset cut to 32 bits": ("const size_t at = (", "const int at = int("),
    "a loop that some lanes leave early": (
        "float score = 0.0f;",
        "float score = 0.0f; if (lane > 30 - t) break;",
    ),
    "accumulators that start from nothing": ("acc[e] = 0.0f;", ""),
    "a merge over one simdgroup too many": ("s < SIMDGROUPS; s++) all_sum", "s <= SIMDGROUPS; s++) all_sum"),
}


class Case:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pools = [SparseArray((BLOCKS, BLOCK_SIZE, DIM), mx.bfloat16, np.uint16) for _ in range(2)]
        self.query = mx.array(rng.standard_normal(DIM).astype(np.float32)) * DIM**-0.5
        rows = [mx.array(rng.standard_normal((CONTEXT, DIM)).astype(np.float32)) for _ in self.pools]
        rows = [row.astype(mx.bfloat16) for row in rows]
        for pool, row in zip(self.pools, rows, strict=True):
            bits = np.array(row.view(mx.uint16))
            for start in range(0, CONTEXT, BLOCK_SIZE):
                block = pool.array[TABLE[start // BLOCK_SIZE]]
                block[:] = 0x7FC0  # NaN
                block[: len(bits[start : start + BLOCK_SIZE])] = bits[start : start + BLOCK_SIZE]
        keys, values = (row.astype(mx.float32) for row in rows)
        weights = mx.softmax(keys @ self.query * np.log(2).astype(np.float32))
        self.expected = np.array(weights @ values)

    def run(self, source: str, conditions: Conditions = STRICT) -> np.ndarray[Any, Any]:
        names = ["q", "keys", "values", "table"]
        kernel = metal_kernel("paged", names, ["out"], source, conditions=conditions)
        (out,) = kernel(
            inputs=[self.query, *self.pools, mx.array(TABLE, mx.uint32)],
            template=[("BLOCK_SIZE", BLOCK_SIZE), ("DIM", DIM), ("CONTEXT", CONTEXT)],
            output_shapes=[(DIM,)],
            output_dtypes=[mx.float32],
            grid=(128, 1, 1),
            threadgroup=(128, 1, 1),
        )
        return np.array(out)

    def agrees(self, out: np.ndarray[Any, Any]) -> bool:
        return bool(np.abs(out - self.expected).max() <= 1e-5 * np.abs(self.expected).max())


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.mark.parametrize(
    "conditions",
    [
        *(
            STRICT,
            Conditions(shuffle_order=1),
            Conditions(shuffle_order=2),
            Conditions(fuse_multiply_add=True),
        ),
        *(Conditions(flush_subnormals=True), Conditions(fast_math_ulps=4)),
    ],
    ids=str,
)
def test_a_correct_kernel_agrees_under_all_conditions(case: Case, conditions: Conditions) -> None:
    assert case.agrees(case.run(SOURCE, conditions))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_a_fault_or_a_wrong_result(case: Case, bug: str) -> None:
    right, wrong = BUGS[bug]
    assert SOURCE.count(right) == 1
    try:
        out = case.run(SOURCE.replace(right, wrong))
    except KernelError:
        return
    assert not case.agrees(out)
