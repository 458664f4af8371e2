"""On the CPU, models' SwiGLU runs as a compiled loop while one of our forward passes does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.models import activations

from mlx_paged_attention.models.seam import rebind
from mlx_paged_attention.ops import host_swiglu

_mlx_lm_swiglu = activations.swiglu
# Whether this thread is within such a pass: mlx-lm's own generation in this process keeps its own.
_ours = threading.local()


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's function of that name."""
    if getattr(_ours, "active", False) and host_swiglu.takes(gate, x):
        return host_swiglu.swiglu(gate, x)
    plain: mx.array = _mlx_lm_swiglu(gate, x)
    return plain


def rebind_swiglu() -> None:
    """Put it in the place of mlx-lm's in every model module that is loaded, ready to run."""
    host_swiglu.compile_loops()
    rebind(_mlx_lm_swiglu, swiglu)


@contextmanager
def host_activations() -> Iterator[None]:
    """A forward pass on the CPU."""
    _ours.active = True
    try:
        yield
    finally:
        _ours.active = False
