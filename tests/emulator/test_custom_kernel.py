"""``metal_kernel`` is called, and answers, as ``mx.fast.metal_kernel`` does."""

import textwrap
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .buffers import SparseArray
from .custom_kernel import emulate, metal_kernel
from .errors import EmulatorError, KernelError

COPY = "uint i = thread_position_in_grid.x; out[i] = x[i];"


def call(
    kernel: Any, x: Any, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, **options: Any
) -> mx.array:
    size = int(np.prod(shape))
    options = {"grid": (size, 1, 1), "threadgroup": (min(size, 32), 1, 1), **options}
    (out,) = kernel(inputs=[x], output_shapes=[shape], output_dtypes=[dtype], **options)
    return out


def test_the_example_of_mlx_s_own_documentation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    doc = mx.fast.metal_kernel.__doc__
    example = textwrap.dedent(doc[doc.index("def exp_elementwise") - 80 :].split("code-block:: python", 1)[1])
    monkeypatch.setattr(mx.fast, "metal_kernel", emulate())
    names: dict[str, Any] = {"mx": mx}
    exec(example, names)  # its last line is an assertion
    np.testing.assert_allclose(np.array(names["b"]), np.array(mx.exp(names["a"])), rtol=1e-3)


@pytest.mark.parametrize(
    "dtype",
    [
        *(mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
    ],
)
def test_every_dtype_passes_through(dtype: mx.Dtype) -> None:
    x = (mx.arange(9) % 3).astype(dtype)
    out = call(metal_kernel("copy", ["x"], ["out"], COPY), x, (9,), dtype)
    assert out.dtype == dtype
    assert mx.array_equal(out, x)


def test_layout_arguments_appear_when_their_names_do() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
    """
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6).T[1:5]
    strided = metal_kernel("strided", ["x"], ["out"], source, ensure_row_contiguous=False)
    copied = metal_kernel("copied", ["x"], ["out"], source)
    assert mx.array_equal(call(strided, x, (4, 4)), x)
    assert mx.array_equal(call(copied, x, (4, 4)), x)


def test_scalars_and_small_inputs_arrive() -> None:
    kernel = metal_kernel("small", ["x"], ["out"], "out[thread_position_in_grid.x] = x;")
    assert mx.array_equal(call(kernel, 2.5, (4,)), mx.full((4,), 2.5))
    kernel = metal_kernel("small", ["x"], ["out"], "uint i = thread_position_in_grid.x; out[i] = x[0];")
    assert mx.array_equal(call(kernel, mx.array([3.0]), (4,)), mx.full((4,), 3.0))


def test_template_arguments_are_types_numbers_and_truths() -> None:
    kernel = metal_kernel("t", ["x"], ["out"], "out[thread_position_in_grid.x] = ADD ? T(x[0]) + N : 0;")
    template = [("T", mx.int32), ("N", 7), ("ADD", True)]
    assert call(kernel, mx.array([2.9]), (1,), template=template).item() == 9
    assert call(kernel, mx.array([2.9]), (1,), template=[*template[:2], ("ADD", False)]).item() == 0


def test_outputs_start_at_the_initial_value() -> None:
    source = "uint i = thread_position_in_grid.x; if (i > 1) out[i] += x[i];"
    out = call(metal_kernel("init", ["x"], ["out"], source), mx.ones((4,)), (4,), init_value=5)
    assert out.tolist() == [5, 5, 6, 6]


def test_atomic_outputs_add_up_across_threadgroups() -> None:
    source = "atomic_fetch_add_explicit(&out[0], x[thread_position_in_grid.x], memory_order_relaxed);"
    kernel = metal_kernel("add", ["x"], ["out"], source, atomic_outputs=True)
    options = {"grid": (128, 1, 1), "threadgroup": (32, 1, 1), "init_value": 0}
    assert call(kernel, mx.arange(128, dtype=mx.float32), (1,), **options).item() == 127 * 64


def test_threadgroups_at_the_edge_of_the_grid_are_smaller() -> None:
    source = "out[thread_position_in_grid.x] = threads_per_threadgroup.x;"
    out = call(metal_kernel("edge", ["x"], ["out"], source), 0.0, (70,))
    assert out.tolist() == [32] * 64 + [6] * 6


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8])
def test_a_mutable_input_changes_in_place(dtype: mx.Dtype) -> None:
    source = "uint i = thread_position_in_grid.x; ((device X*)x)[i + 1] = X(7); out[i] = 1;"
    kernel = metal_kernel("write", ["x"], ["out"], source, mutable_inputs=("x",))
    x = mx.zeros((10,), dtype)
    token = call(kernel, x, (1,), template=[("X", dtype)])
    assert token.item() == 1
    assert x.tolist() == [0, 7, *[0] * 8]


def test_a_fault_leaves_mutable_inputs_as_they_were() -> None:
    source = "uint i = thread_position_in_grid.x; ((device float*)x)[0] = 7; out[i] = x[10];"
    kernel = metal_kernel("write", ["x"], ["out"], source, mutable_inputs=("x",))
    x = mx.zeros((10,))
    with pytest.raises(KernelError, match="past the end of 'x'"):
        call(kernel, x, (1,))
    assert not x.any().item()


def test_a_mutable_input_that_would_be_copied_is_refused() -> None:
    kernel = metal_kernel("write", ["x"], ["out"], COPY, mutable_inputs=("x",))
    with pytest.raises(EmulatorError, match="row contiguous"):
        call(kernel, mx.zeros((4, 5)).T, (1,))


def test_a_patched_mlx_knows_each_kernel_s_mutable_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", emulate(mutable_inputs={"write": ["x"]}))
    source = "((device float*)x)[0] = 7; out[0] = 1;"
    x = mx.zeros((10,))
    call(mx.fast.metal_kernel(name="write", input_names=["x"], output_names=["out"], source=source), x, (1,))
    assert x[0].item() == 7
    with pytest.raises(KernelError, match="not declared mutable"):
        call(
            mx.fast.metal_kernel(name="other", input_names=["x"], output_names=["out"], source=source),
            x,
            (1,),
        )


def test_arrays_larger_than_memory_hold_what_was_written_to_them() -> None:
    pool = SparseArray((2**20, 16, 512), mx.bfloat16, np.uint16)  # 2³³ elements
    pool.array[-1, -1, -4:] = 0x3F80  # 1.0
    source = """
        uint i = thread_position_in_grid.x;
        const size_t last = size_t(1) << 33;
        out[i] = float(pool[last - 4 + i]);
        ((device bfloat16_t*)pool)[last - 8 + i] = bfloat16_t(2.0f);
    """
    kernel = metal_kernel("sparse", ["pool"], ["out"], source, mutable_inputs=("pool",))
    with pytest.raises(EmulatorError, match="no room for buffer 'pool'"):
        call(kernel, pool, (4,))
    pool = SparseArray((2**18, 16, 512), mx.bfloat16, np.uint16)  # 2³¹ elements
    pool.array[-1, -1, -4:] = 0x3F80
    kernel = metal_kernel(
        "sparse", ["pool"], ["out"], source.replace("<< 33", "<< 31"), mutable_inputs=("pool",)
    )
    assert call(kernel, pool, (4,)).tolist() == [1, 1, 1, 1]
    assert pool.array[-1, -1, -8:-4].tolist() == [0x4000] * 4


def test_what_cannot_be_launched_is_refused() -> None:
    kernel = metal_kernel("copy", ["x"], ["out"], COPY)
    with pytest.raises(EmulatorError, match="at most 1024 threads"):
        call(kernel, mx.zeros((2048,)), (2048,), grid=(2048, 1, 1), threadgroup=(2048, 1, 1))
    with pytest.raises(EmulatorError, match="empty grid"):
        call(kernel, mx.zeros((8,)), (8,), grid=(0, 1, 1))
    with pytest.raises(EmulatorError, match="three sizes"):
        call(kernel, mx.zeros((8,)), (8,), grid=(8,))
    with pytest.raises(ValueError, match="inputs: 2 for 1 names"):
        kernel(
            inputs=[mx.zeros((1,))] * 2,
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
    with pytest.raises(ValueError, match="names no input: y"):
        metal_kernel("copy", ["x"], ["out"], COPY, mutable_inputs=("y",))
    with pytest.raises(ValueError, match="math_mode"):
        metal_kernel("copy", ["x"], ["out"], COPY, compile_options={"math_mode": "quick"})
