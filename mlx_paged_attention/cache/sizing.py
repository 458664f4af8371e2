"""How large the pool is, how long a request may be, how much one step computes."""

from dataclasses import dataclass

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What was derived from the configuration, the model and the machine.

    Attributes:
        num_blocks: the null block included.
        full_length_requests: requests of ``max_model_len`` that fit at once.
        notes: what was limited, and by what.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    full_length_requests: float
    notes: list[str]


def plan_pool(
    config: EngineConfig,
    *,
    bytes_per_block: int,
    model_max_len: int,
    free_memory: int,
    on_host: bool,
) -> PoolPlan:
    """Derive what the configuration leaves open.

    Args:
        bytes_per_block: over all layers.
        model_max_len: the longest context the model was made for.
        free_memory: bytes that weights have left over; a pool takes at most a quarter of it
            unless its size is given.
        on_host: the CPU computes: smaller steps keep it responsive.

    Raises:
        InvalidRequestError: the budget holds no request at all, or exceeds the memory.
        ModelLoadError: the machine has no memory for a pool.
    """
    notes: list[str] = []
    size = config.block_size
    max_num_seqs = config.max_num_seqs or (64 if on_host else 256)
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    batched = config.max_num_batched_tokens or max(256 if on_host else 2048, max_num_seqs)
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise InvalidRequestError(
            f"max_model_len ({max_model_len}) exceeds the {model_max_len} tokens the model was made for",
            "max_model_len",
        )

    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        check_budget(num_blocks * bytes_per_block, free_memory, "num_blocks", num_blocks)
    elif config.kv_memory is not None:
        num_blocks = config.kv_memory // bytes_per_block
        if num_blocks < 2:
            raise InvalidRequestError(
                f"kv_memory ({config.kv_memory} bytes) holds no two blocks of {bytes_per_block} bytes "
                f"({size} tokens each); give at least {2 * bytes_per_block}",
                "kv_memory",
            )
        check_budget(config.kv_memory, free_memory, "kv_memory", config.kv_memory)
    else:
        wanted = 1 + max_num_seqs * -(-max_model_len // size)
        num_blocks = min(wanted, free_memory // 4 // bytes_per_block)
        if num_blocks < 2:
            raise ModelLoadError(
                f"too little memory for a KV cache: {free_memory // MIB} MiB are free beside the weights, "
                f"and two blocks need {2 * bytes_per_block / MIB:.1f} MiB in a quarter of that; "
                "close other programs or use a smaller model"
            )

    capacity = (num_blocks - 1) * size
    if config.max_model_len is None and capacity < max_model_len:
        notes.append(f"max_model_len is {capacity}, what the pool holds (the model allows {model_max_len})")
        max_model_len = capacity
    elif capacity < max_model_len:
        notes.append(
            f"the pool holds {capacity} tokens, less than max_model_len ({max_model_len}): "
            "longer requests are refused"
        )
    per_request = -(-max_model_len // size)
    return PoolPlan(num_blocks, max_model_len, max_num_seqs, batched, (num_blocks - 1) / per_request, notes)


def check_budget(pool_bytes: int, free_memory: int, name: str, value: int) -> None:
    """Refuse a pool that the machine has no memory for, named by the field that asks for it."""
    if pool_bytes > free_memory:
        raise InvalidRequestError(
            f"{name} ({value}) asks for a pool of {pool_bytes // MIB} MiB, "
            f"but only {free_memory // MIB} MiB of memory are free",
            name,
        )
