"""LatentCase: random queries and a pool of latents, and what attention over them must give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.kernel_check.decode_case import errors
from mlx_paged_attention.ops.kernels.latent import latent_decode, latent_threadgroups_per_item
from mlx_paged_attention.ops.kernels.work_list import work_list

SCALE = 0.1


@dataclass
class LatentCase:
    """Queries and a pool with shuffled tables; every slot that no query may read is NaN.

    Attributes:
        q: ``[rows, heads, 1, latent_dim]``.
        q_rope: ``[rows, heads, 1, rope_dim]``.
        latents: ``[blocks, 1, block_size, latent_dim]``.
        ropes: ``[blocks, 1, block_size, rope_dim]``.
        tables: int32 ``[rows, width]``.
        lens: int32 ``[rows]``.
    """

    q: mx.array
    q_rope: mx.array
    latents: mx.array
    ropes: mx.array
    tables: NDArray[np.int32]
    lens: NDArray[np.int32]

    @classmethod
    def random(
        cls,
        seed: int,
        dtype: mx.Dtype,
        heads: int,
        dims: tuple[int, int],
        contexts: Sequence[int],
        *,
        size: int = 16,
    ) -> Self:
        """A case of numbers drawn from a normal distribution.

        Args:
            dims: (latent_dim, rope_dim).
            contexts: positions of each row.
            size: tokens per block.
        """
        rng = np.random.default_rng(seed)
        lens = np.array(contexts, np.int32)
        used = -(-lens // size)
        order = list(rng.permutation(np.arange(1, 1 + used.sum())))
        tables = np.zeros((len(lens), max(1, used.max())), np.int32)
        pools = [np.full((1 + used.sum(), 1, size, dim), np.nan, np.float32) for dim in dims]
        for row, length in enumerate(lens):
            tables[row, : used[row]] = [order.pop() for _ in range(used[row])]
            at = np.arange(length)
            for pool in pools:
                pool[tables[row, at // size], 0, at % size] = rng.standard_normal((length, pool.shape[3]))
        # As far from each other in their scores as queries and keys of whole heads would be.
        queries = [
            rng.standard_normal((len(lens), heads, 1, dim)).astype(np.float32) * factor
            for dim, factor in zip(dims, (1.0, SCALE), strict=True)
        ]
        q, q_rope, latents, ropes = (mx.array(x).astype(dtype) for x in (*queries, *pools))
        return cls(q, q_rope, latents, ropes, tables, lens)

    def attend(
        self, target: int | None = None, capacity: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The kernel's output ``[rows, heads, latent_dim]`` and log-sum-exp ``[rows, heads]``.

        Args:
            target, capacity: as for ``work_list``; 1 and ``None`` leave every context whole.
        """
        work = work_list(
            self.lens,
            1,
            block_size=self.latents.shape[2],
            threadgroups_per_item=latent_threadgroups_per_item(self.q, self.latents),
            target=target,
            capacity=capacity,
        )
        out, lse, _ = latent_decode(
            self.q, self.q_rope, self.latents, self.ropes, mx.array(self.tables), mx.array(self.lens), work,
            scale=SCALE,
        )  # fmt: skip
        assert out.dtype == self.q.dtype
        return np.array(out[:, :, 0].astype(mx.float32)), np.array(lse[:, 0])

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same in float64, from the values that the arrays hold."""
        q, q_rope, latents, ropes = (
            np.array(x.astype(mx.float32)).astype(np.float64)
            for x in (self.q[:, :, 0], self.q_rope[:, :, 0], self.latents[:, 0], self.ropes[:, 0])
        )
        size = latents.shape[1]
        out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for row, context in enumerate(self.lens):
            if not context:
                continue
            at = np.arange(context)
            values, rotated = (plane[self.tables[row, at // size], at % size] for plane in (latents, ropes))
            scores = SCALE * q[row] @ values.T + q_rope[row] @ rotated.T
            peak = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(axis=1, keepdims=True)
            lse[row] = (peak + np.log(total))[:, 0]
            out[row] = weights / total @ values
        return out, lse

    def errors(self, target: int | None = None) -> tuple[float, float]:
        """Largest error of the output relative to its largest value, and of the log-sum-exp."""
        return errors(self.attend(target), self.expected())
