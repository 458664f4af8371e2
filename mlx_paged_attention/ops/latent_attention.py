"""Latent attention over contiguous arrays, in plain MLX: the kernel's reference, and what runs without it."""

import mlx.core as mx


def plain_latent_attention(
    q: mx.array, q_rope: mx.array, latents: mx.array, ropes: mx.array, mask: mx.array, *, scale: float
) -> mx.array:
    """Attention of one query per row over latents that are keys and values at once (MLA).

    Args:
        q: ``[rows, heads, 1, latent_dim]``.
        q_rope: ``[rows, heads, 1, rope_dim]``, scaled.
        latents: ``[rows, 1, positions, latent_dim]``; finite, behind the context as well.
        ropes: ``[rows, 1, positions, rope_dim]``, likewise.
        mask: boolean ``[rows, 1, 1, positions]``, which positions each row may read.
        scale: factor of ``q @ latents``.

    Returns:
        ``[rows, heads, 1, latent_dim]`` in ``q``'s type.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
    """
    scores = q_rope @ ropes.swapaxes(-1, -2)
    scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    return mx.fast.scaled_dot_product_attention(q, latents, latents, scale=scale, mask=scores)
