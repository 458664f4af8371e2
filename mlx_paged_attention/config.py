"""EngineConfig: everything a person can set about an engine, validated once."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mlx_paged_attention.errors import InvalidRequestError

DType = Literal["auto", "float32", "float16", "bfloat16"]
SchedulingPolicy = Literal["fcfs", "priority", "longest_prefix"]
Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how much memory and concurrency to give it.

    ``None`` means "derive it from the model and the machine"; what was derived is printed
    at start and readable from ``LLM.stats()``.

    Attributes:
        model: Hugging Face repo id, MLX model directory or ``.gguf`` path; ``None`` is the
            bundled SmolLM2-135M-Instruct.
        adapter_path: directory of a LoRA or DoRA adapter in mlx-lm's format, which is added to the weights.
        dtype: floating-point type of weights and KV cache. ``"auto"`` is the checkpoint's own
            on a GPU and ``float32`` on a CPU.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool, the null block included; all are there from the start. Excludes
            ``kv_memory``.
        kv_memory: what the pool may grow to: bytes, or, as a float up to 1, a fraction of the memory that
            weights and a step's activations leave.
        kv_idle_seconds: the pool gives back what no request has used for so long, and the cached prefixes
            in it; 0 keeps everything. A pool of ``num_blocks`` stays as it is.
        max_model_len: longest prompt plus answer, in tokens.
        max_num_seqs: most requests computed in one step.
        max_num_batched_tokens: token budget of one step.
        enable_prefix_caching: reuse the KV blocks of equal prompt prefixes.
        scheduling_policy: who is served first: ``"fcfs"``, ``"priority"`` (lower value first) or
            ``"longest_prefix"`` (most tokens in the prefix cache first).
        max_overtaken_seconds: under ``"longest_prefix"``, how long a waiting request may be overtaken.
        watchdog_seconds: with work to do and no step ending for so long, ``/health`` turns red and what
            hangs is logged; after twice as long the engine is given up. 0 never does.
        seed: base of the seeds of requests that bring none; ``None`` draws one at start.
        skip_tokenizer_init: serve token ids only, for models without a tokenizer.
        device: ``"cpu"``, ``"gpu"`` or ``None`` for MLX's default.

    Raises:
        InvalidRequestError: a value is out of range; the message names the field.
    """

    model: str | None = None
    adapter_path: str | None = None
    dtype: DType = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | float | None = None
    kv_idle_seconds: float = 600.0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_overtaken_seconds: float = 5.0
    watchdog_seconds: float = 300.0
    seed: int | None = None
    skip_tokenizer_init: bool = False
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("model", "adapter_path"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, not {type(value).__name__}", name)
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        if self.device is not None:
            _one_of("device", self.device, get_args(Device))
        _at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            _at_least("num_blocks", self.num_blocks, 2)
        if self.kv_memory is not None and not _is_memory(self.kv_memory):
            raise InvalidRequestError(
                "kv_memory must be bytes (an integer of at least 1) or a fraction above 0.0 and up to 1.0, "
                f"not {self.kv_memory!r}",
                "kv_memory",
            )
        idle = self.kv_idle_seconds
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 <= idle < float("inf"):
            raise InvalidRequestError(
                f"kv_idle_seconds must be a number of seconds, 0 or more, not {idle!r}", "kv_idle_seconds"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1)
        for name in ("max_overtaken_seconds", "watchdog_seconds"):
            _seconds(name, getattr(self, name))
        for name in ("enable_prefix_caching", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InvalidRequestError(f"seed must be an integer, not {self.seed!r}", "seed")
        if self.num_blocks is not None and self.kv_memory is not None:
            raise InvalidRequestError(
                "give num_blocks or kv_memory, not both: each fixes the pool's size", "num_blocks"
            )
        if self.scheduling_policy == "longest_prefix" and not self.enable_prefix_caching:
            raise InvalidRequestError(
                "scheduling_policy longest_prefix needs enable_prefix_caching: else no prefix is cached",
                "scheduling_policy",
            )
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise InvalidRequestError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): "
                "every running request needs one token per step",
                "max_num_batched_tokens",
            )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", name)


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be an integer of at least {least}, not {value!r}", name)


def _is_memory(value: object) -> bool:
    """Whether it is a number of bytes, or a fraction."""
    if isinstance(value, float):
        return 0 < value <= 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidRequestError(f"{name} must be seconds, 0 or more, not {value!r}", name)
