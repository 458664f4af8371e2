"""The project's kernels without a GPU, run by the Metal emulator."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from emulator import metal_kernel, what_is_missing

from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import make


@contextmanager
def emulated_kernels(**options: Any) -> Iterator[None]:
    """Kernels run in the emulator, each as it is called; layers on kernels are possible.

    Args:
        options: further ones of ``emulator.metal_kernel``.
    """
    if reason := what_is_missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    def compile_kernel(
        name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, mutable: Sequence[str]
    ) -> Callable[..., list[mx.array]]:
        header = make.source("metal.h")
        fixed = {"ensure_row_contiguous": False, "mutable_inputs": mutable}
        return metal_kernel(name, inputs, outputs, body, header, **fixed, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "compile_kernel", compile_kernel)
        patch.setattr(KernelLayer, "supports", staticmethod(lambda spec: True))
        make._compiled.cache_clear()
        try:
            yield
        finally:
            make._compiled.cache_clear()


def skip_without_gpu() -> None:
    """Skip the test where kernels cannot run on a GPU."""
    if make.backend() is None:
        pytest.skip("no GPU that MLX can use")
