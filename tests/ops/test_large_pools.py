"""Pools of more than 2**31 elements, whose addresses no 32-bit number holds."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.ops.kernels.decode import paged_decode, threadgroups_per_item
from mlx_paged_attention.ops.kernels.make import backend
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.kernels.work_list import work_list

HEADS, KV_HEADS, SIZE, DIM = 16, 8, 16, 128
# A block in the middle of the pool, one whose first element is number 2**31, and the last.
BLOCKS = 2**31 // (KV_HEADS * SIZE * DIM) + 3


@pytest.mark.gpu
def test_blocks_beyond_2_to_the_31_elements_are_written_copied_gathered_and_attended_to():
    if backend() is None:
        pytest.skip("no GPU that MLX can use")
    pools = [mx.zeros((BLOCKS, KV_HEADS, SIZE, DIM), mx.float16) for _ in range(2)]
    mx.eval(pools)
    assert pools[0].size > 2**31
    rng = np.random.default_rng(0)
    written = [BLOCKS - 3, BLOCKS - 1]
    length = 2 * SIZE
    k, v = (mx.array(rng.standard_normal((1, KV_HEADS, length, DIM)), mx.float16) for _ in range(2))
    slots = np.add.outer(np.array(written) * SIZE, np.arange(SIZE)).astype(np.int32).reshape(-1)
    done = write_kv(k, v, *pools, mx.array(slots), no_token())
    source, target = mx.array([BLOCKS - 1], mx.int32), mx.array([BLOCKS - 2], mx.int32)
    done = copy_blocks(*pools, source, target, done)

    table = np.array([BLOCKS - 3, BLOCKS - 2], np.int32)
    keys, values, done = gather_kv(*pools, mx.array(table), 0, length, done)
    assert mx.array_equal(keys, k)
    assert mx.array_equal(values, v)

    q = mx.array(rng.standard_normal((1, HEADS, 1, DIM)), mx.float16)
    lens = np.array([length], np.int32)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1)
    for target_threadgroups in (1, 100):
        work = work_list(
            lens,
            1,
            block_size=SIZE,
            threadgroups_per_item=threadgroups_per_item(q, *pools),
            target=target_threadgroups,
        )
        out, _, _ = paged_decode(
            q, *pools, mx.array(table[None]), mx.array(lens), work, scale=0.1, after=done
        )
        np.testing.assert_allclose(np.array(out), np.array(expected), atol=2e-3)

    # Nothing has wrapped round into the front of the pool.
    assert not pools[0][: 1 << 10].any()
    assert not pools[1][: 1 << 10].any()
