"""Rotary position embedding where MLX's CUDA kernel cannot be launched."""

from typing import Any

import mlx.core as mx

_mlx_rope = mx.fast.rope


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """``mx.fast.rope``: same arguments, same result, for any number of rows.

    Args:
        a: ``[rows, heads, queries, head_dim]``.
    """
    if a.ndim == 4 and not _can_be_launched(a, dims):
        return plain_rope(a, dims, traditional, base, scale, offset, freqs)
    rotated: mx.array = _mlx_rope(
        a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, stream=stream
    )
    return rotated


def replace_rope() -> None:
    """Put it in the place of MLX's, which models call by way of ``mx.fast``."""
    mx.fast.rope = rope


def plain_rope(
    a: mx.array,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None,
) -> mx.array:
    """Rotate the first ``dims`` of ``a [rows, heads, queries, head_dim]``, in float32.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Args:
        traditional: pairs are neighbours, not halves.
        base, freqs: one of them: wave lengths are ``base ** (2 i / dims)``, or ``freqs [dims // 2]``.
        scale: of positions.
        offset: position of each row's first query, ``[rows]`` or one for all.
    """
    half = dims // 2
    if freqs is None:
        assert base is not None, "rope needs base or freqs"
        inverse = mx.power(base, -mx.arange(half, dtype=mx.float32) / half)
    else:
        inverse = 1.0 / freqs
    positions = mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(a.shape[2])[:, None]
    angle = positions.astype(mx.float32) * scale * inverse
    cos, sin = mx.cos(angle), mx.sin(angle)
    turned = a[..., :dims].astype(mx.float32)
    if traditional:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = [first * cos - second * sin, first * sin + second * cos]
    rotated = (
        mx.stack(parts, axis=-1).reshape(turned.shape) if traditional else mx.concatenate(parts, axis=-1)
    )
    rotated = rotated.astype(a.dtype)
    return rotated if dims == a.shape[-1] else mx.concatenate([rotated, a[..., dims:]], axis=-1)


def _can_be_launched(a: mx.array, dims: int) -> bool:
    """Whether MLX gives its kernel a block of threads that CUDA allows: at most 64 deep.

    It splits 1,024 threads evenly, in powers of 2, among pairs of dimensions, queries, and each row's heads
    in fours; with few dimensions and a single query the last get more than 64.
    """
    rows, heads, queries, _ = a.shape
    wide = (dims // 2).bit_length() - 1 + queries.bit_length() - 1
    return wide > 3 or rows * -(-heads // 4) < 128
