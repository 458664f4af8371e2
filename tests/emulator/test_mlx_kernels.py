"""MLX's own Metal kernels, from the installed package's headers, against MLX's results on the CPU.

They run under every check, so a false alarm fails here too.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .buffers import Buffer, output
from .conditions import Conditions
from .dispatch import launch
from .errors import KernelError
from .program import compile_kernel
from .toolchain import mlx_include

KERNELS = "mlx/backend/metal/kernels"
NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.uint32: np.uint32}
METAL = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.uint32: "uint32_t"}
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}

# A lane that fails a bound of the row may sit a reduction out.
MLX = Conditions(simd="converged lanes")


def run_mlx(
    headers: list[str],
    expression: str,
    arguments: dict[int, Any],
    out: tuple[int, tuple[int, ...], mx.Dtype],
    *,
    threadgroups: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    function_constants: dict[int, int] | None = None,
    edit: Callable[[str], str] | None = None,
) -> mx.array:
    """Launches ``expression`` and returns the output, which is argument ``out[0]``.

    ``edit`` changes the text of the last header.
    """
    metal = "".join(f'#include "{KERNELS}/{header}"\n' for header in ["utils.h", *headers])
    if edit is not None:
        text = (mlx_include() / KERNELS / headers[-1]).read_text()
        metal = metal.replace(f'#include "{KERNELS}/{headers[-1]}"\n', edit(text))
    program = compile_kernel(
        metal, expression, function_constants=function_constants, check_address_spaces=False
    )
    buffers = {i: Buffer(np.ascontiguousarray(_numpy(a)), f"argument {i}") for i, a in arguments.items()}
    index, shape, dtype = out
    result = np.empty(shape, NUMPY[dtype])
    buffers[index] = output(result, "the output")
    grid = [groups * threads for groups, threads in zip(threadgroups, threadgroup, strict=True)]
    launch(program, buffers, grid=grid, threadgroup=threadgroup, conditions=MLX)
    array = mx.array(result)
    return array if array.dtype == dtype else array.view(dtype)


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, mx.array):
        return np.asarray(value)
    return np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)).astype(dtype)


def assert_close(result: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    error = mx.abs(result - expected).max().item() / max(mx.abs(expected).max().item(), 1e-30)
    assert error <= TOLERANCE[dtype], error


def softmax(x: mx.array, edit: Callable[[str], str] | None = None) -> mx.array:
    rows, row = x.shape
    return run_mlx(
        ["softmax.h"],
        f"softmax_single_row<{METAL[x.dtype]}, float>",
        {0: x, 2: np.int32(row)},
        (1, x.shape, x.dtype),
        threadgroups=(rows, 1, 1),
        threadgroup=(160, 1, 1),
        edit=edit,
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", [512, 333])
def test_softmax(dtype: mx.Dtype, row: int) -> None:
    x = random(3, row, dtype=dtype)
    assert_close(softmax(x), mx.softmax(x, axis=-1, precise=True), dtype)


def test_log_sum_exp_of_a_row_longer_than_the_threadgroup() -> None:
    x = random(2, 5000)
    result = run_mlx(
        ["logsumexp.h"],
        "logsumexp_looped<float>",
        {0: x, 2: np.int32(5000)},
        (1, (2,), mx.float32),
        threadgroups=(2, 1, 1),
        threadgroup=(1024, 1, 1),
    )
    assert_close(result, mx.logsumexp(x, axis=-1), mx.float32)


# dtype, query heads over two key heads, causal, sinks
ATTENTION = {
    "plain": (mx.float32, 2, False, False),
    "grouped heads in half": (mx.float16, 8, False, False),
    "causal": (mx.float32, 4, True, False),
    "sinks": (mx.float32, 4, False, True),
}


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sinks: mx.array | None = None,
    causal: bool = False,
    edit: Callable[[str], str] | None = None,
) -> mx.array:
    _, heads, queries, dim = q.shape
    _, kv_heads, keys, _ = k.shape
    strides = [np.int64(keys * dim), np.int64(dim)]
    sizes = [np.int32(heads // kv_heads), np.int32(keys), *strides, *strides, np.float32(dim**-0.5)]
    arguments = {0: q, 1: k, 2: v, **dict(enumerate(sizes, start=4))}
    if sinks is not None:
        arguments |= {16: sinks, 17: np.int32(heads)}
    return run_mlx(
        ["sdpa_vector.h"],
        f"sdpa_vector<{METAL[q.dtype]}, {dim}>",
        arguments,
        (3, q.shape, q.dtype),
        threadgroups=(heads, queries, 1),
        threadgroup=(1024, 1, 1),
        function_constants={22: int(causal), 25: int(sinks is not None)},
        edit=edit,
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_for_one_or_a_few_queries(name: str) -> None:
    dtype, heads, causal, with_sinks = ATTENTION[name]
    q = random(1, heads, 3 if causal else 1, 64, dtype=dtype)
    k, v = (random(1, 2, 45, 64, dtype=dtype) * factor for factor in (1, 2))
    sinks = random(heads, dtype=dtype) if with_sinks else None
    expected = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=64**-0.5, mask="causal" if causal else None, sinks=sinks
    )
    assert_close(attention(q, k, v, sinks, causal), expected, dtype)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
WEAKER = ["", "simdgroup_barrier(mem_flags::mem_threadgroup);", BARRIER.replace("threadgroup)", "none)")]


@pytest.mark.slow
@pytest.mark.parametrize("weaker", WEAKER, ids=["gone", "the simdgroup's", "of no memory"])
@pytest.mark.parametrize(
    ("kernel", "barrier"),
    [*(("softmax", i) for i in range(5)), *(("attention", i) for i in range(3))],
)
def test_each_barrier_is_missed(kernel: str, barrier: int, weaker: str) -> None:
    def edit(text: str) -> str:
        parts = text.split(BARRIER)
        return BARRIER.join(parts[: barrier + 1]) + weaker + BARRIER.join(parts[barrier + 1 :])

    def run() -> mx.array:
        if kernel == "softmax":
            return softmax(random(1, 512), edit)
        return attention(random(1, 2, 1, 64), random(1, 2, 45, 64), random(1, 2, 45, 64), edit=edit)

    with pytest.raises(KernelError, match=r"data race|uninitialised"):
        run()


def test_a_quantised_matrix_times_a_vector() -> None:
    rows, columns = 16, 512
    w, scales, biases = mx.quantize(random(rows, columns), group_size=64, bits=4)
    x = random(1, columns)
    result = run_mlx(
        ["steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"],
        "affine_qmv_fast<float, 64, 4, false>",
        {0: w, 1: scales, 2: biases, 3: x, 5: np.int32(columns), 6: np.int32(rows)},
        (4, (1, rows), mx.float32),
        threadgroups=(1, rows // 8, 1),
        threadgroup=(32, 2, 1),
    )
    expected = mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=64, bits=4)
    assert_close(result, expected, mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_a_cumulative_sum(inclusive: bool, reverse: bool) -> None:
    x = random(2, 4500)
    flags = f"{str(inclusive).lower()}, {str(reverse).lower()}"
    result = run_mlx(
        ["scan.h"],
        f"contiguous_scan<float, float, CumSum<float>, 4, {flags}>",
        {0: x, 2: np.uint64(4500)},
        (1, x.shape, mx.float32),
        threadgroups=(1, 2, 1),
        threadgroup=(1024, 1, 1),
    )
    assert_close(result, mx.cumsum(x, axis=-1, inclusive=inclusive, reverse=reverse), mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize("arguments_too", [False, True])
def test_a_sort(arguments_too: bool) -> None:
    x = random(2, 700)
    dtype = mx.uint32 if arguments_too else mx.float32
    strides = {2: np.int32(700), 3: np.int32(1), 4: np.int32(1), 5: np.int32(700), 6: np.int32(700)}
    result = run_mlx(
        ["sort.h"],
        f"block_sort<float, {METAL[dtype]}, {str(arguments_too).lower()}, 128, 8>",
        {0: x, **strides},
        (1, x.shape, dtype),
        threadgroups=(1, 2, 1),
        threadgroup=(128, 1, 1),
    )
    assert mx.array_equal(result, mx.argsort(x, axis=-1) if arguments_too else mx.sort(x, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_for_many_queries_by_matrices(dtype: mx.Dtype, causal: bool) -> None:
    heads, kv_heads, length, dim = 2, 1, 70, 64
    block_q, block_k = 32, 32
    q, k, v = (
        random(1, h, length, dim, dtype=dtype) * s for h, s in ((heads, 1), (kv_heads, 2), (kv_heads, 3))
    )
    scale = dim**-0.5
    blocks_q, blocks_k = -(-length // block_q), -(-length // block_k)
    head_strides = [[h * length * dim, length * dim, dim] for h in (heads, kv_heads, kv_heads)]
    params = np.zeros(
        1,
        np.dtype(
            [
                ("sizes", np.int32, 6),
                ("scale", np.float32),
                ("blocks", np.int32, 7),
                ("strides", np.int64, (4, 3)),
            ],
            align=True,
        ),
    )
    params["sizes"] = [1, heads, dim, length, length, heads // kv_heads]
    params["scale"] = scale
    params["blocks"] = [
        *(blocks_q, blocks_k, length // block_q, length // block_k),
        *(length % block_q, length % block_k, 0),
    ]
    params["strides"] = [*head_strides, head_strides[0]]
    result = run_mlx(
        ["steel/attn/kernels/steel_attention.h"],
        f"attention<{METAL[dtype]}, {block_q}, {block_k}, {dim}, {dim}, 4, 1>",
        {0: q, 1: k, 2: v, 4: params},
        (3, q.shape, dtype),
        threadgroups=(blocks_q, heads, 1),
        threadgroup=(32, 4, 1),
        function_constants={200: 0, 201: 0, 301: int(causal)},
    )
    mask = "causal" if causal else None
    assert_close(result, mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask), dtype)
