"""Flags that several commands share, named as vLLM's, and what becomes of them."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from mlx_paged_attention.api.report import startup_report
from mlx_paged_attention.config import Device, DType, EngineConfig, SchedulingPolicy
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

_ENGINE = Group.create_ordered("Engine", help="What is not given is derived from the model and the machine.")
_SAMPLING = Group.create_ordered(
    "Sampling", help="What is not given comes from the model's own configuration."
)


def parse_bytes(text: str) -> int:
    """``"1073741824"``, ``"512MiB"`` or ``"4GB"`` in bytes; KB, MB, GB are powers of 1000.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            f"{text!r} is not a size; write bytes, a number with a unit, such as 512MiB or 4GB, "
            "or a fraction, such as 0.5"
        )
    unit = match[2].upper()
    power = 0 if not unit else "KMGT".index(unit) + 1
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_kv_memory(text: str) -> int | float:
    """Bytes as of :func:`parse_bytes`, or with a point and without a unit a fraction: ``"0.5"``, ``"1.0"``.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"\s*\d*\.\d+\s*", text):
        return float(text)
    return parse_bytes(text)


def _kv_memory(_: Any, tokens: Any) -> int | float:
    return parse_kv_memory(tokens[0].value)


def _flag(text: str, **options: Any) -> Parameter:
    return Parameter(help=text, **options)


@Parameter(name="*", group=_ENGINE)
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Those fields of ``EngineConfig`` that say which model it is, and where it computes."""

    model: Annotated[
        str | None,
        _flag(
            "Hugging Face repo id, MLX model directory or .gguf file. Without it: SmolLM2-135M-Instruct, "
            "fetched once (93 MB)."
        ),
    ] = None
    adapter_path: Annotated[
        str | None, _flag("Directory of a LoRA or DoRA adapter of mlx-lm, added to the weights.")
    ] = None
    dtype: Annotated[
        DType, _flag("Type of weights and KV cache; auto: the checkpoint's own, on a CPU float32.")
    ] = "auto"
    device: Annotated[Device | None, _flag("Where to run; without it MLX's default.")] = None


@Parameter(name="*", group=_ENGINE)
@dataclass(frozen=True, kw_only=True)
class EngineFlags(ModelFlags):
    """The fields of ``EngineConfig``."""

    max_model_len: Annotated[int | None, _flag("Longest prompt plus answer, in tokens.")] = None
    max_num_seqs: Annotated[int | None, _flag("Most requests computed in one step.")] = None
    max_num_batched_tokens: Annotated[int | None, _flag("Token budget of one step.")] = None
    block_size: Annotated[int, _flag("Tokens per KV block.")] = 16
    num_blocks: Annotated[
        int | None,
        _flag(
            "KV blocks in the pool; excludes --kv-memory.", name=["--num-blocks", "--num-gpu-blocks-override"]
        ),
    ] = None
    kv_memory: Annotated[
        int | float | None,
        _flag(
            "What the KV pool may grow to: bytes, or with a unit, as 512MiB or 4GB, or a fraction, as 0.7, "
            "of the memory that weights and activations leave; without it half of that.",
            converter=_kv_memory,
        ),
    ] = None
    kv_idle_seconds: Annotated[
        float, _flag("Give back memory that the KV pool has not needed for so long; 0: never.")
    ] = 600.0
    enable_prefix_caching: Annotated[bool, _flag("Reuse the KV blocks of equal prompt prefixes.")] = True
    scheduling_policy: Annotated[
        SchedulingPolicy,
        _flag(
            "Who is served first: fcfs, priority (lower value first), or longest_prefix (most tokens in the "
            "prefix cache first)."
        ),
    ] = "fcfs"
    max_overtaken_seconds: Annotated[
        float, _flag("Under longest_prefix: how long a waiting request may be overtaken.")
    ] = 5.0
    watchdog_seconds: Annotated[
        float,
        _flag(
            "No step ends for so long: what hangs is logged, /health turns red; after twice as long the "
            "engine is given up. 0 never."
        ),
    ] = 300.0
    seed: Annotated[int | None, _flag("Makes runs repeatable; without it one is drawn.")] = None
    skip_tokenizer_init: Annotated[
        bool, _flag("Serve token ids only, for models without a tokenizer.", negative="", show_default=False)
    ] = False

    def options(self, *, text: bool = False) -> dict[str, Any]:
        """Keyword arguments of ``AsyncLLM``, checked.

        Args:
            text: the command reads and writes text, and so needs a tokenizer.

        Raises:
            InvalidRequestError: a value is out of range; the message names the field.
        """
        if text and self.skip_tokenizer_init:
            raise InvalidRequestError(
                "skip_tokenizer_init serves token ids only, and this command is about text: leave it out",
                "skip_tokenizer_init",
            )
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        EngineConfig(**options)
        return options


@Parameter(name="*", group=_SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of ``SamplingParams`` that a person at a terminal may want."""

    temperature: Annotated[float | None, _flag("0 always takes the likeliest token.")] = None
    top_p: Annotated[float | None, _flag("Sample from the likeliest tokens of this total probability.")] = (
        None
    )
    top_k: Annotated[int | None, _flag("Sample from this many likeliest tokens.")] = None
    min_p: Annotated[float | None, _flag("Drop tokens less likely than this fraction of the likeliest.")] = (
        None
    )
    repetition_penalty: Annotated[float | None, _flag("Above 1: discourage what was said.")] = None
    presence_penalty: Annotated[float | None, _flag("Subtracted once from tokens already given.")] = None
    frequency_penalty: Annotated[float | None, _flag("Subtracted per occurrence in the answer.")] = None
    max_tokens: Annotated[int | None, _flag("Most tokens of an answer.")] = None
    min_tokens: Annotated[int | None, _flag("No end before this many tokens.")] = None
    stop: Annotated[
        list[str] | None, _flag("Text that ends an answer; may be given several times.", negative="")
    ] = None
    ignore_eos: Annotated[
        bool, _flag("Go on past the model's end-of-sequence token.", negative="", show_default=False)
    ] = False

    def params(self, defaults: dict[str, Any], **own: Any) -> SamplingParams:
        """What was given over ``defaults``.

        Raises:
            InvalidRequestError: a value is out of range; the message names the field.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(defaults | given | own))


DEFAULT_MODEL = ModelFlags()
DEFAULT_ENGINE = EngineFlags()
DEFAULT_SAMPLING = SamplingFlags()


@contextmanager
def loaded(options: dict[str, Any]) -> "Iterator[AsyncLLM]":
    """An engine, started with progress and a report on stderr, closed at the end."""
    from mlx_paged_attention.api.async_llm import AsyncLLM

    llm = AsyncLLM(**options, progress=say)
    try:
        say(startup_report(llm.info))
        yield llm
    finally:
        llm.close()


def say(line: str) -> None:
    """Tell the person something that is not the answer: on stderr, stdout is the answer's."""
    print(line, file=sys.stderr, flush=True)
