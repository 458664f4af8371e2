"""How large the pool is, how long a request may be, how much one step computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged_attention.cache.block_need import BlockNeed
from mlx_paged_attention.cache.block_pool import GROWTH
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError

MIB = 1 << 20
# Of the memory that weights and activations leave; the rest stays for whatever else the machine runs.
DEFAULT_SHARE = 0.5
# Of a model that keeps no keys and values: enough to share prefixes, and few enough to be made at once.
MOST_COUNTED_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What was derived from the configuration, the model and the machine.

    Attributes:
        num_blocks: as many as the pool may grow to, the null block included.
        start_blocks: as many as it begins with; 0: all of them, and it stays so.
        num_states: slots for the states of recurrent layers, slot 0 included; 0 without such layers.
        full_length_requests: requests of ``max_model_len`` that fit at once.
        notes: what was limited, and by what.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    full_length_requests: float
    notes: list[str]
    num_states: int = 0
    start_blocks: int = 0


def step_limits(config: EngineConfig, *, on_host: bool) -> tuple[int, int]:
    """``max_num_seqs`` and ``max_num_batched_tokens``, if nothing else limits them.

    Args:
        on_host: the CPU computes: smaller steps keep it responsive.
    """
    max_num_seqs = config.max_num_seqs or (64 if on_host else 256)
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    batched = config.max_num_batched_tokens or max(step_tokens(config, on_host=on_host), max_num_seqs)
    return max_num_seqs, batched


def plan_pool(
    config: EngineConfig,
    *,
    bytes_per_block: int,
    windows: Sequence[int | None] = (None,),
    bytes_per_state: int = 0,
    model_max_len: int,
    free_memory: int,
    step_memory: int = 0,
    on_host: bool,
) -> PoolPlan:
    """Derive what the configuration leaves open.

    Args:
        bytes_per_block: of one block, in all places for layers, which may be none.
        windows: of the layer groups, which take their blocks from one pool.
        bytes_per_state: of one sequence, over all recurrent layers.
        model_max_len: the longest context the model was made for.
        free_memory: bytes that weights have left over.
        step_memory: bytes of those that a step takes beside the pool. Of what is left then, pool and states
            take at most half unless their size is given.
        on_host: see :func:`step_limits`.

    Raises:
        InvalidRequestError: the budget holds no request at all, or exceeds the memory.
        ModelLoadError: the machine has no memory for a pool.
    """
    notes: list[str] = []
    size = config.block_size
    max_num_seqs, batched = step_limits(config, on_host=on_host)
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise InvalidRequestError(
            f"max_model_len ({max_model_len}) exceeds the {model_max_len} tokens the model was made for",
            "max_model_len",
        )

    room = free_memory - step_memory
    if isinstance(config.kv_memory, int):
        check_budget(config.kv_memory, room, "kv_memory", config.kv_memory)
        budget, asked = config.kv_memory, f"{config.kv_memory} bytes"
    else:
        share = DEFAULT_SHARE if config.kv_memory is None else config.kv_memory
        budget = int(max(0, room) * share)
        asked = f"{config.kv_memory} of {room} bytes"
    need = BlockNeed(windows, size, batched)
    least_blocks = 1 + need.most(1)
    num_states = state_bytes = 0
    least = _least_memory(least_blocks * bytes_per_block, bytes_per_state, config.max_num_seqs or 1)
    if bytes_per_state:
        most = budget // (2 if bytes_per_block else 1) // bytes_per_state
        num_states, max_num_seqs = _plan_states(
            config, asked, bytes_per_state, max_num_seqs, most, least, notes
        )
        state_bytes = (num_states - 1) * bytes_per_state
    wanted = 1 + max_num_seqs * need.most(max_model_len)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        check_budget(num_blocks * bytes_per_block + state_bytes, room, "num_blocks", num_blocks)
        if num_blocks < least_blocks:
            raise InvalidRequestError(
                f"num_blocks ({num_blocks}) is too few: the null block and one for each of the model's "
                f"{len(windows)} layer groups are {least_blocks}",
                "num_blocks",
            )
    elif not bytes_per_block:  # blocks are only counted
        num_blocks = min(wanted, max(MOST_COUNTED_BLOCKS, 1 + need.most(max_model_len)))
    else:
        num_blocks = (budget - state_bytes) // bytes_per_block
        if num_blocks < least_blocks and config.kv_memory is not None:
            raise InvalidRequestError(
                f"kv_memory ({asked}) holds no {_few(least_blocks)} blocks of {bytes_per_block} bytes "
                f"({size} tokens each); give at least {least}",
                "kv_memory",
            )
        if config.kv_memory is None:
            num_blocks = min(wanted, num_blocks)
        if num_blocks < least_blocks:
            raise ModelLoadError(
                f"too little memory for a KV cache: {room // MIB} MiB are free beside the weights and what "
                f"a step takes, and {_few(least_blocks)} blocks need "
                f"{least_blocks * bytes_per_block / MIB:.1f} MiB in half of that; "
                "close other programs or use a smaller model"
            )

    capacity = need.longest(num_blocks - 1, max_model_len)
    if config.max_model_len is None and capacity < max_model_len:
        notes.append(f"max_model_len is {capacity}, what the pool holds (the model allows {model_max_len})")
        max_model_len = capacity
    elif capacity < max_model_len:
        notes.append(
            f"the pool holds {capacity} tokens, less than max_model_len ({max_model_len}): "
            "longer requests are refused"
        )
    full_length = (num_blocks - 1) / need.most(max_model_len)
    start = max(least_blocks, min(1 + need.most(2 * batched), -(-num_blocks // GROWTH)))
    if config.num_blocks is not None or not bytes_per_block or start >= num_blocks:
        start = 0
    return PoolPlan(num_blocks, max_model_len, max_num_seqs, batched, full_length, notes, num_states, start)


def step_tokens(config: EngineConfig, *, on_host: bool) -> int:
    """Tokens that one step computes at most, where few requests run."""
    return config.max_num_batched_tokens or (256 if on_host else 2048)


def _few(number: int) -> str:
    return "two" if number == 2 else str(number)


def _least_memory(least_blocks: int, bytes_per_state: int, max_num_seqs: int) -> int:
    """A ``kv_memory`` that holds the fewest blocks, and so many requests' states in at most half of it.

    Args:
        least_blocks: their bytes.
    """
    states = 2 * max_num_seqs * bytes_per_state
    if not bytes_per_state or not least_blocks:
        return least_blocks + states
    return 2 * max(states, least_blocks)


def _plan_states(
    config: EngineConfig,
    asked: str,
    bytes_per_state: int,
    max_num_seqs: int,
    most: int,
    least: int,
    notes: list[str],
) -> tuple[int, int]:
    """Slots for states, slot 0 included, and how many requests may run with them.

    Args:
        asked: ``kv_memory`` in words.
        most: states that there is memory for.
        least: ``kv_memory`` that would do.
    """
    fit = most // 2  # a request may need two at a time
    state = f"{bytes_per_state / MIB:.1f} MiB" if bytes_per_state >= MIB else f"{bytes_per_state:,} bytes"
    if fit >= max_num_seqs:
        return 1 + min(3 * max_num_seqs, most), max_num_seqs
    if fit >= 1 and config.max_num_seqs is None:
        notes.append(f"max_num_seqs is {fit}: each request needs two states of {state}")
        return 1 + most, fit
    if config.kv_memory is not None:
        raise InvalidRequestError(
            f"kv_memory ({asked}) is too little for the states of recurrent layers, two of "
            f"{state} for each request: give at least {least}, or lower max_num_seqs",
            "kv_memory",
        )
    if fit >= 1:
        raise InvalidRequestError(
            f"max_num_seqs ({max_num_seqs}) needs two states of {state} for each request, and there is "
            f"memory for {most}: lower max_num_seqs to {fit} or set kv_memory to at least {least}",
            "max_num_seqs",
        )
    raise ModelLoadError(
        f"too little memory for the states of recurrent layers: a request needs two of {state}; "
        "close other programs or use a smaller model"
    )


def check_budget(pool_bytes: int, free_memory: int, name: str, value: int) -> None:
    """Refuse a pool that the machine has no memory for, named by the field that asks for it."""
    if pool_bytes > free_memory:
        raise InvalidRequestError(
            f"{name} ({value}) asks for a pool of {pool_bytes // MIB} MiB, "
            f"but only {free_memory // MIB} MiB of memory are free",
            name,
        )
