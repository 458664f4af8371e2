"""DecodeCase: random queries and a pool, and what attention over them must give."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.kernels.decode import paged_decode, threadgroups_per_item
from mlx_paged_attention.ops.kernels.work_list import work_list

# Largest error relative to the largest value of the reference.
TOLERANCE: dict[mx.Dtype, float] = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
# A log-sum-exp may be this many times as far off, and absolutely.
LSE_FACTOR = 10


@dataclass
class DecodeCase:
    """Queries and pools with shuffled tables; every slot that no query may read is NaN.

    Row ``b`` holds ``contexts[b]`` positions; its queries attend up to the last ones of them, as
    tokens of one sequence do.

    Attributes:
        q: ``[rows, heads, queries, head_dim]``.
        k, v: ``[blocks, kv_heads, block_size, head_dim]``.
        tables: int32 ``[rows, width]``.
        lens: int32 ``[rows * queries]``.
        sinks: float32 ``[heads]``.
        window, softcap: as for ``paged_attention``.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    tables: NDArray[np.int32]
    lens: NDArray[np.int32]
    sinks: mx.array | None
    window: int | None
    softcap: float | None

    @classmethod
    def random(
        cls,
        seed: int,
        dtype: mx.Dtype,
        heads: tuple[int, int, int, int],
        contexts: Sequence[int],
        *,
        queries: int = 1,
        window: int | None = None,
        sink: float | None = None,
        softcap: float | None = None,
        size: int = 16,
    ) -> Self:
        """A case of numbers drawn from a normal distribution.

        Args:
            heads: (heads, kv_heads, head_dim, v_head_dim).
            contexts: positions of each row.
            sink: mean of the heads' sinks; none by default.
            size: tokens per block.
        """
        rng = np.random.default_rng(seed)
        num_heads, kv_heads, head_dim, v_dim = heads
        ends = np.array(contexts)
        lens = np.maximum(ends[:, None] - np.arange(queries)[::-1], 0)
        used = -(-ends // size)
        order = list(rng.permutation(np.arange(1, 1 + used.sum())))
        tables = np.zeros((len(ends), max(1, used.max())), np.int32)
        k, v = (np.full((1 + used.sum(), kv_heads, size, d), np.nan, np.float32) for d in (head_dim, v_dim))
        for row, end in enumerate(ends):
            tables[row, : used[row]] = [order.pop() for _ in range(used[row])]
            at = np.arange(0 if window is None else max(0, lens[row].min() - window), end)
            for plane in (k, v):
                new = rng.standard_normal((len(at), kv_heads, plane.shape[3]))
                plane[tables[row, at // size], :, at % size] = new
        q = rng.standard_normal((len(ends), num_heads, queries, head_dim)).astype(np.float32)
        sinks = None if sink is None else mx.array(rng.standard_normal(num_heads).astype(np.float32) + sink)
        typed_q, typed_k, typed_v = (mx.array(x).astype(dtype) for x in (q, k, v))
        lens = lens.astype(np.int32).reshape(-1)
        return cls(typed_q, typed_k, typed_v, tables, lens, sinks, window, softcap)

    def attend(
        self, target: int | None = None, capacity: int | None = None, *, picked: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The kernels' output ``[rows, queries, heads, v_head_dim]`` and log-sum-exp.

        Args:
            target, capacity: as for ``work_list``; 1 and ``None`` leave every context whole.
            picked: scatter the queries among other tokens, from where the kernel is to pick them.
        """
        q, places = self._scattered() if picked else (self.q, None)
        work = work_list(
            self.lens,
            self.q.shape[2],
            block_size=self.k.shape[2],
            threadgroups_per_item=threadgroups_per_item(self.q, self.k, self.v),
            window=self.window,
            target=target,
            capacity=capacity,
        )
        out, lse, _ = paged_decode(
            q, self.k, self.v, mx.array(self.tables), mx.array(self.lens), work,
            scale=self.q.shape[3] ** -0.5, window=self.window, sinks=self.sinks, softcap=self.softcap,
            picked=places,
        )  # fmt: skip
        assert out.dtype == self.q.dtype
        return np.array(out.astype(mx.float32)).swapaxes(1, 2), np.array(lse)

    def _scattered(self) -> tuple[mx.array, mx.array]:
        """The queries among NaN, ``[tokens, heads, 1, head_dim]``, and their places ``[rows, queries]``."""
        rows, heads, queries, head_dim = self.q.shape
        places = np.random.default_rng(0).permutation(2 * rows * queries)[: rows * queries].astype(np.int32)
        tokens = mx.full((2 * rows * queries, heads, 1, head_dim), mx.nan, self.q.dtype)
        tokens[mx.array(places)] = self.q.swapaxes(1, 2).reshape(-1, heads, 1, head_dim)
        return tokens, mx.array(places.reshape(rows, queries))

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same in float64, from the values that the arrays hold."""
        q, k, v = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (self.q, self.k, self.v))
        rows, heads, queries, head_dim = q.shape
        _, kv_heads, size, v_dim = v.shape
        group = heads // kv_heads
        out = np.zeros((rows, queries, heads, v_dim))
        lse = np.full((rows, queries, heads), -np.inf)
        for row, i in itertools.product(range(rows), range(queries)):
            context = int(self.lens[row * queries + i])
            first = max(0, context - self.window) if self.window else 0
            at = np.arange(first, context)
            keys, values = (p[self.tables[row, at // size], :, at % size] for p in (k, v))
            scores = np.einsum("kgd,nkd->kgn", q[row, :, i].reshape(kv_heads, group, -1), keys)
            scores = scores.reshape(heads, -1) * head_dim**-0.5
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.sinks is not None:
                scores = np.concatenate([scores, np.array(self.sinks)[:, None]], axis=1)
            if not scores.shape[1]:
                continue
            peak = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - peak)
            lse[row, i] = peak[:, 0] + np.log(weights.sum(axis=1))
            weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(at)]
            result = np.einsum("kgn,nkd->kgd", weights.reshape(kv_heads, group, -1), values)
            out[row, i] = result.reshape(heads, -1)
        return out, lse

    def errors(self, target: int | None = None) -> tuple[float, float]:
        """Largest error of the output relative to its largest value, and of the log-sum-exp."""
        return errors(self.attend(target), self.expected())


def errors(
    got: tuple[NDArray[Any], NDArray[Any]], want: tuple[NDArray[Any], NDArray[Any]]
) -> tuple[float, float]:
    """Largest error of an output relative to the largest value wanted, and of a log-sum-exp; may be NaN."""
    (out, lse), (want_out, want_lse) = got, want
    with np.errstate(invalid="ignore"):
        gap = np.where(lse == want_lse, 0, np.abs(lse - want_lse))
    return float(np.abs(out - want_out).max() / max(np.abs(want_out).max(), 1e-9)), float(gap.max())
