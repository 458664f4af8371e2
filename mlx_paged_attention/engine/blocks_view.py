"""BlocksView: the memory of a running engine at one step border, for people who look into it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_paged_attention.cache.block_map import BlockRun, map_blocks
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.engine.outputs import EngineStats
from mlx_paged_attention.scheduler.request import Request, RequestStatus

# As many as run at once on the largest machines; thousands may wait.
MAX_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class RequestView:
    """What one sequence holds. Nothing of its text.

    Attributes:
        request_id: with ``#index`` for one of several answers.
        status: ``"running"``, ``"waiting"`` or ``"preempted"``.
        age: seconds since it arrived.
        prompt_tokens: of its prompt.
        output_tokens: generated so far.
        computed_tokens: of both, those whose keys and values are in its blocks.
        cached_tokens: prompt tokens that were found in the prefix cache.
        blocks: that it holds, of all layer groups.
        empty_slots: in the last of them, that no token has yet.
        preemptions: how often it lost its blocks.
    """

    request_id: str
    status: str
    age: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    empty_slots: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class BlocksView:
    """Who holds which block, and what it is worth.

    Attributes:
        model: its name.
        stats: the engine's counts at the same moment.
        shared_blocks: blocks held by more than one request.
        saved_blocks: blocks that would be held in addition if nothing were shared.
        empty_slots: slots of held blocks that no token has yet.
        waste: those, as a share of all slots of held blocks; 0 to 1.
        hit_rate: prompt tokens found in the prefix cache per token looked up, since the start; 0 to 1.
        recent_hit_rate: the same over about the last 1,000 requests.
        copies: blocks copied because another sequence goes on from within them.
        requests: the running ones, then the others by arrival; :data:`MAX_REQUESTS` at most.
        requests_left_out: how many more there are.
        runs: the pool, block by block, as runs of blocks that are alike.
        blocks_left_out: blocks after the last run, where the pool is too scattered to list.
    """

    model: str
    stats: EngineStats
    shared_blocks: int
    saved_blocks: int
    empty_slots: int
    waste: float
    hit_rate: float
    recent_hit_rate: float
    copies: int
    requests: tuple[RequestView, ...]
    requests_left_out: int
    runs: tuple[BlockRun, ...]
    blocks_left_out: int


def view_blocks(
    model: str, stats: EngineStats, cache: KVCacheManager, requests: Iterable[Request], copies: int
) -> BlocksView:
    """Look at a cache and the requests that use it, between two steps.

    Args:
        requests: all that are alive.
        copies: blocks copied so far.
    """
    tables = list(cache.held_tables())
    blocks = map_blocks(cache.pool.blocks, tables)
    held: dict[str, tuple[int, int]] = {}
    for table in tables:
        count, empty = held.get(table.request_id, (0, 0))
        held[table.request_id] = (count + len(table.blocks), empty + table.empty_slots)
    now = time.monotonic()
    # Sorting is stable: in each part the earlier arrival stays first.
    ordered = sorted(requests, key=lambda request: request.status is not RequestStatus.RUNNING)
    slots = stats.used_blocks * cache.block_size
    return BlocksView(
        model=model,
        stats=stats,
        shared_blocks=blocks.shared_blocks,
        saved_blocks=blocks.saved_blocks,
        empty_slots=blocks.empty_slots,
        waste=blocks.empty_slots / slots if slots else 0.0,
        hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        recent_hit_rate=cache.hit_rate.hit_rate,
        copies=copies,
        requests=tuple(_view(one, *held.get(one.request_id, (0, 0)), now) for one in ordered[:MAX_REQUESTS]),
        requests_left_out=max(0, len(ordered) - MAX_REQUESTS),
        runs=blocks.runs,
        blocks_left_out=blocks.blocks_left_out,
    )


def _view(request: Request, blocks: int, empty_slots: int, now: float) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        status=request.status.name.lower(),
        age=round(now - request.arrival_time, 3),
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        computed_tokens=request.num_computed_tokens,
        cached_tokens=request.num_cached_tokens,
        blocks=blocks,
        empty_slots=empty_slots,
        preemptions=request.num_preemptions,
    )
