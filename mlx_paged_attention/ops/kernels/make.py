"""Kernel: a body under source/ made for the GPU back end at hand. The one place where kernels are made."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import mlx.core as mx

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
def source(name: str) -> str:
    """The text of a file under source/."""
    return (files("mlx_paged_attention.ops.kernels") / "source" / name).read_text()


def compile_kernel(
    name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, mutable: Sequence[str]
) -> Callable[..., list[mx.array]]:
    """MLX's callable for a body; ``mutable`` names the inputs that it writes through.

    Inputs are passed as they lie, never copied: a copy of a pool would swallow the write.
    """
    made: Any
    if backend() == "cuda":
        made = mx.fast.cuda_kernel(
            name, inputs, outputs, body, header=source("cuda.h"), ensure_row_contiguous=False
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
        tail: a second file whose text follows the first.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutable: tuple[str, ...] = ()
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
    ) -> list[mx.array]:
        """Arguments as for ``mx.fast.metal_kernel``; ``grid`` counts threads."""
        # MLX finds compiled kernels by name and template arguments alone, so whatever else
        # changes the generated text belongs to the name: the types of inputs, on Metal also
        # whether they are small (fewer than 8 elements are passed as constants), and the body.
        signature = tuple((str(x.dtype), x.size < 8) for x in inputs)
        return _compiled(self, signature)(
            inputs=list(inputs),
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
        )


@cache
def _compiled(kernel: Kernel, signature: tuple[tuple[str, bool], ...]) -> Callable[..., list[mx.array]]:
    body = source(f"{kernel.name}.metal") + (source(kernel.tail) if kernel.tail else "")
    text = (signature, source("cuda.h"), source("metal.h"), body)
    digest = hashlib.sha256(repr(text).encode()).hexdigest()[:12]
    name = f"paged_attention_{kernel.name}_{digest}"
    return compile_kernel(name, kernel.inputs, kernel.outputs, body, kernel.mutable)


@cache
def unread() -> mx.array:
    """What a kernel gets where it reads nothing: never so small that MLX passes it as a constant."""
    return mx.array([0.0] * 8, mx.float32)
