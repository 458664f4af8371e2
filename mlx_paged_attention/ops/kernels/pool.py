"""Operations on one layer's pool, in place: new keys and values, copies of blocks, contiguous ranges."""

import math

import mlx.core as mx

from mlx_paged_attention.ops.kernels.make import Kernel

# Longer than the 8 bytes that MLX keeps in the host's memory on CUDA, beyond the bus for a kernel.
TOKEN = (8,)

_WRITE = Kernel("write_kv", ("k", "v", "k_pool", "v_pool", "slots", "after"), ("done",), ("k_pool", "v_pool"))
_COPY = Kernel(
    "copy_blocks", ("k_pool", "v_pool", "source", "target", "after"), ("done",), ("k_pool", "v_pool")
)
_GATHER = Kernel(
    "gather_kv", ("k_pool", "v_pool", "block_table", "span", "after"), ("keys", "values", "done")
)


def write_kv(
    k: mx.array,
    v: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    slots: mx.array,
    after: mx.array,
) -> mx.array:
    """Write new keys and values into the pool, in place.

    Args:
        k, v: ``[rows, kv_heads, queries, head_dim]``, strided as they like; converted to the
            pool's type.
        k_pool, v_pool: ``[blocks, kv_heads, block_size, head_dim]``, whole arrays, which keep
            their identity.
        slots: int32 ``[rows * queries]``, ``block_id * block_size + offset``.
        after: the ordering token of what must have happened before: reads of what was in the
            slots, copies into their blocks.

    Returns:
        The ordering token that readers of these slots must take.
    """
    rows, kv_heads, queries, head_dim = k.shape
    v_dim = v.shape[3]
    (done,) = _WRITE(
        [k, v, k_pool, v_pool, slots, after],
        [("S", k_pool.dtype), ("KH", kv_heads), ("DK", head_dim), ("DV", v_dim), ("BS", k_pool.shape[2])],
        grid=(kv_heads * max(head_dim, v_dim), rows * queries, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[TOKEN],
        output_dtypes=[mx.float32],
    )
    return done


def copy_blocks(
    k_pool: mx.array, v_pool: mx.array, source: mx.array, target: mx.array, after: mx.array
) -> mx.array:
    """Copy whole blocks inside the pool, in place: block ``source[i]`` to block ``target[i]``.

    Args:
        source, target: int32 ``[n]``; no block may be in both, nor twice in ``target``.
        after: the ordering token, as for ``write_kv``.

    Returns:
        The ordering token that the first write that follows must take.
    """
    key_bytes, value_bytes = (math.prod(pool.shape[1:]) * pool.dtype.size for pool in (k_pool, v_pool))
    (done,) = _COPY(
        [k_pool, v_pool, source, target, after],
        [("KEY_BYTES", key_bytes), ("VALUE_BYTES", value_bytes)],
        grid=(max(key_bytes, value_bytes) // 16, source.shape[0], 1),
        threadgroup=(128, 1, 1),
        output_shapes=[TOKEN],
        output_dtypes=[mx.float32],
    )
    return done


def gather_kv(
    k_pool: mx.array,
    v_pool: mx.array,
    block_table: mx.array,
    first: int,
    last: int,
    after: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Keys and values of positions ``first .. last - 1`` of one sequence, contiguous.

    Args:
        block_table: int32 ``[width]``.
        after: the ordering token of the writes that must be seen.

    Returns:
        ``[1, kv_heads, last - first, head_dim]`` each, in the pool's type; the ordering token.
    """
    kv_heads, block_size, head_dim = k_pool.shape[1:]
    v_dim = v_pool.shape[3]
    parts = max(head_dim, v_dim) * k_pool.dtype.size // 16
    keys, values, done = _GATHER(
        [k_pool, v_pool, block_table, mx.array([first, last] + [0] * 6, mx.int32), after],
        [("S", k_pool.dtype), ("DK", head_dim), ("DV", v_dim), ("KH", kv_heads), ("BS", block_size)],
        grid=((last - first) * parts, kv_heads, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(1, kv_heads, last - first, head_dim), (1, kv_heads, last - first, v_dim), TOKEN],
        output_dtypes=[k_pool.dtype, v_pool.dtype, mx.float32],
    )
    return keys, values, done
