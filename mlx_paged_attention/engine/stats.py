"""The engine's counts, gathered from those who keep them."""

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.engine.elastic_pool import ElasticPool
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats
from mlx_paged_attention.scheduler.scheduler import Scheduler


def gather_stats(
    info: EngineInfo, cache: KVCacheManager, scheduler: Scheduler, pool: ElasticPool
) -> EngineStats:
    """As they are now."""
    return EngineStats(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        free_blocks=cache.num_free_blocks,
        cached_blocks=cache.num_cached_blocks,
        used_blocks=cache.num_usable_blocks - cache.num_free_blocks,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        preemptions=scheduler.num_preemptions,
        prefix_queries=cache.stats.queries,
        prefix_hits=cache.stats.hits,
        pool_bytes=info.pool_bytes // info.num_blocks * pool.num_blocks,
        steps=scheduler.num_steps,
        pool_budget_bytes=info.pool_bytes,
        pool_growths=pool.num_growths,
        pool_shrinks=pool.num_shrinks,
        pool_growths_refused=pool.num_refusals,
    )
