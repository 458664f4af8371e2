"""SpeedCase: the same tokens in a pool and in contiguous arrays, and how to time attention over both."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_paged_attention.ops.kernels.decode import paged_decode, threadgroups_per_item
from mlx_paged_attention.ops.kernels.make import upload
from mlx_paged_attention.ops.kernels.work_list import work_list

# Builds a graph of that many calls, each of which needs the one before it.
Chain = Callable[[int], mx.array]
BLOCK_SIZE = 16


class SpeedCase:
    """Random bfloat16 pools with shuffled tables, enough sets of rows to outgrow the chip's caches.

    Args:
        context: of every row, a multiple of 16.
        spread: bytes of keys and values that the sets are to take together, if 16 are enough.
    """

    def __init__(self, rows: int, context: int, kv_heads: int, head_dim: int, *, spread: int) -> None:
        self.rows = rows
        width = context // BLOCK_SIZE
        self.kv_bytes = 2 * rows * context * kv_heads * head_dim * 2
        sets = max(1, min(16, spread // self.kv_bytes))
        blocks = 1 + sets * rows * width
        order = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
        tables = order.reshape(sets, rows, width)
        self.pools = [_random((blocks, kv_heads, BLOCK_SIZE, head_dim)) for _ in range(2)]
        self.tables = [mx.array(table) for table in tables]
        self.contiguous = [[self._rows_of(pool, table) for pool in self.pools] for table in self.tables]
        self.lens = np.full(rows, context, np.int32)
        self.device_lens = upload(self.lens)

    @staticmethod
    def _rows_of(pool: mx.array, table: mx.array) -> mx.array:
        """``[rows, kv_heads, context, head_dim]``."""
        rows = [pool[blocks].swapaxes(0, 1).flatten(1, 2)[None] for blocks in table]
        whole = mx.concatenate(rows)
        mx.eval(whole)
        return whole

    def chains(self, heads: int, target: int | None = None) -> tuple[Chain, Chain]:
        """Paged and contiguous attention of the same queries.

        Args:
            target: threadgroups that the work list aims for; as many as should be fastest by default.
        """
        k_pool, v_pool = self.pools
        head_dim = k_pool.shape[3]
        q0 = mx.random.normal((self.rows, heads, 1, head_dim), mx.bfloat16)
        mx.eval(q0)
        scale = head_dim**-0.5
        work = work_list(
            self.lens,
            1,
            block_size=BLOCK_SIZE,
            threadgroups_per_item=threadgroups_per_item(q0, k_pool, v_pool),
            target=target,
        )

        def paged(links: int) -> mx.array:
            q = q0
            for i in range(links):
                table = self.tables[i % len(self.tables)]
                q, _, _ = paged_decode(q, k_pool, v_pool, table, self.device_lens, work, scale=scale)
            return q

        def contiguous(links: int) -> mx.array:
            q = q0
            for i in range(links):
                keys, values = self.contiguous[i % len(self.tables)]
                q = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)
            return q

        return paged, contiguous


def _random(shape: tuple[int, ...]) -> mx.array:
    """In pieces: random numbers are made as float32, at twice the memory."""
    piece = max(1, (64 << 20) // math.prod(shape[1:]))
    parts = []
    for begin in range(0, shape[0], piece):
        parts.append(mx.random.normal((min(piece, shape[0] - begin), *shape[1:]), mx.bfloat16))
        mx.eval(parts[-1])
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return whole


def gap(one: mx.array, other: mx.array) -> float:
    """Largest difference, relative to the other's largest value."""
    got, want = (np.array(x.astype(mx.float32)) for x in (one, other))
    return float(np.abs(got - want).max() / np.abs(want).max())


def seconds_per_link(chain: Chain, links: int) -> float:
    """Time to evaluate a chain, per call; building the graph is not counted."""
    result = chain(links)
    begin = time.perf_counter()
    mx.eval(result)
    return (time.perf_counter() - begin) / links


def links_for(chain: Chain, seconds: float) -> int:
    """How many calls take about that long, 4 to 200."""
    mx.synchronize()
    seconds_per_link(chain, 2)
    return max(4, min(200, math.ceil(seconds / seconds_per_link(chain, 8))))


def seconds_per_call(chain: Chain, budget: float = 0.15) -> float:
    """Median time of one call."""
    links = links_for(chain, budget / 4)
    return statistics.median(seconds_per_link(chain, links) for _ in range(5))


def in_turns(chains: Sequence[Chain], rounds: int, seconds: float) -> list[list[float]]:
    """Seconds per call of each chain in each round: A B, B A, A B, ... so that a drift hits all alike."""
    links = [links_for(chain, seconds) for chain in chains]
    times: list[list[float]] = [[] for _ in chains]
    for turn in range(rounds):
        order = range(len(chains)) if turn % 2 == 0 else reversed(range(len(chains)))
        for i in order:
            times[i].append(seconds_per_link(chains[i], links[i]))
    return times
