"""Kernel: a body under source/ made for the GPU back end at hand. The one place where kernels are made."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Backend = Literal["metal", "cuda"]
TemplateArgument = mx.Dtype | int | bool


def backend() -> Backend | None:
    """The back end that custom kernels run on, or ``None``: MLX's CPU back end has none."""
    if mx.default_device() != mx.Device(mx.gpu):
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


@cache
def copies_to_shared_memory() -> bool:
    """Whether the GPU has a copy engine, and the shared memory to make use of it: Hopper and its like.

    Consumers' GPUs of the generation after have the engine, but half the memory.
    """
    return backend() == "cuda" and mx.device_info().get("compute_capability_major") in (9, 10)


def upload(values: NDArray[np.int32]) -> mx.array:
    """Metadata that kernels read: at least 8 numbers long, the rest 0.

    MLX passes shorter arrays as constants on Metal; on CUDA it keeps arrays of up to 8 bytes in the
    host's memory, where each read takes a kernel microseconds.
    """
    if values.size >= 8:
        return mx.array(values)
    return mx.array(np.concatenate([values.reshape(-1), np.zeros(8 - values.size, np.int32)]))


@cache
def source(name: str) -> str:
    """The text of a file under source/."""
    return (files("mlx_paged_attention.ops.kernels") / "source" / name).read_text()


def compile_kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    mutable: Sequence[str],
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """MLX's callable for a body; ``mutable`` names the inputs that it writes through.

    CUDA gives it ``shared_memory`` bytes beyond what its text declares.
    Inputs are passed as they lie, never copied: a copy of a pool would swallow the write.
    """
    made: Any
    if backend() == "cuda":
        made = mx.fast.cuda_kernel(
            name,
            inputs,
            outputs,
            body,
            header=source("cuda.h"),
            ensure_row_contiguous=False,
            shared_memory=shared_memory,
        )
    else:
        made = mx.fast.metal_kernel(
            name, inputs, outputs, body, header=source("metal.h"), ensure_row_contiguous=False
        )
    compiled: Callable[..., list[mx.array]] = made
    return compiled


@dataclass(frozen=True)
class Kernel:
    """A kernel, compiled on demand for the types that it meets.

    Attributes:
        name: of its file under source/.
        inputs, outputs: parameter names.
        mutable: the inputs that are written in place.
        head, tail: files whose text comes before and after it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutable: tuple[str, ...] = ()
    head: str = ""
    tail: str = ""

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, TemplateArgument]],
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Arguments as for ``mx.fast.metal_kernel``; ``grid`` counts threads.

        ``shared_memory`` follows from ``template``, and is for CUDA alone.
        """
        # MLX finds compiled kernels by name and template arguments alone, so whatever else
        # changes the generated text belongs to the name: the types of inputs, on Metal also
        # whether they are small (fewer than 8 elements are passed as constants), and the body.
        signature = tuple((str(x.dtype), x.size < 8) for x in inputs)
        return _compiled(self, signature, shared_memory)(
            inputs=list(inputs),
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
        )


@cache
def _compiled(
    kernel: Kernel, signature: tuple[tuple[str, bool], ...], shared_memory: int
) -> Callable[..., list[mx.array]]:
    body = "".join(source(file) for file in (kernel.head, f"{kernel.name}.metal", kernel.tail) if file)
    text = (signature, source("cuda.h"), source("metal.h"), body)
    digest = hashlib.sha256(repr(text).encode()).hexdigest()[:12]
    name = f"paged_attention_{kernel.name}_{digest}"
    more = {"shared_memory": shared_memory} if shared_memory else {}
    return compile_kernel(name, kernel.inputs, kernel.outputs, body, kernel.mutable, **more)


@cache
def unread() -> mx.array:
    """What a kernel gets where it reads nothing: never so small that MLX passes it as a constant."""
    return mx.array([0.0] * 8, mx.float32)
