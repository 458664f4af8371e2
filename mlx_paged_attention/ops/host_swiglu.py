"""SwiGLU on the CPU: a compiled loop whose exponential takes several numbers at a time, as MLX's does not."""

from typing import Any

import mlx.core as mx
import numba
import numpy as np

from mlx_paged_attention.ops.host_kernel import F32, ONE_LOOP, exp_below_zero

# Elements from which the loop saves more than it costs to stop MLX's graph.
LEAST = 8192
# Elements below which waking other threads costs more than it saves.
_SERIAL = 65_536
_STRIP = 4096  # elements that a thread works on at a time


def takes(gate: mx.array, x: mx.array) -> bool:
    """Whether :func:`swiglu` is for these arrays, and faster than MLX."""
    return gate.size >= LEAST and gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x`` of float32 arrays of one shape, which are evaluated.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    mx.eval(gate, x)
    out = np.empty(gate.shape, np.float32)
    loop = _serial if gate.size < _SERIAL else _parallel
    with ONE_LOOP:
        loop(_flat(gate), _flat(x), out.reshape(-1))
    return mx.array(out)


def compile_loops() -> None:
    """So that no request waits for it."""
    few = np.zeros(1, np.float32)
    with ONE_LOOP:
        for loop in (_serial, _parallel):
            loop(few, few, few.copy())


def _flat(x: mx.array) -> F32:
    return np.ascontiguousarray(np.array(x, copy=False)).reshape(-1)


def _swiglu(gate: F32, x: F32, out: F32) -> None:
    for strip in numba.prange((out.shape[0] + _STRIP - 1) // _STRIP):
        begin = strip * _STRIP
        g, u, o = gate[begin : begin + _STRIP], x[begin : begin + _STRIP], out[begin : begin + _STRIP]
        for i in range(o.shape[0]):
            # Below, g times its sigmoid is less than 1e-37, and the exponential knows nothing so small.
            z = np.float32(-90) if g[i] < np.float32(-90) else g[i]
            tail = exp_below_zero(-abs(z))
            # The sigmoid of -|z| is tail / (1 + tail), that of |z| the rest to 1: no overflow either way.
            part = np.float32(1) if z >= 0 else tail
            o[i] = z * part / (np.float32(1) + tail) * u[i]


_options: dict[str, Any] = {"cache": True, "error_model": "numpy"}
_serial = numba.njit(**_options)(_swiglu)
_parallel = numba.njit(parallel=True, **_options)(_swiglu)
