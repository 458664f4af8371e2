"""``mx.fast.metal_kernel``, run by the emulator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .buffers import Array, Buffer, SparseArray, output
from .conditions import STRICT, Conditions
from .dispatch import Statistics, launch
from .errors import EmulatorError
from .mlx_source import Argument, TemplateArguments, generate
from .program import compile_kernel

_BITS = {mx.bfloat16: mx.uint16}
_MATH_MODES = ("safe", "relaxed", "fast")


class MetalKernel:
    """What ``metal_kernel`` returns: call it as you would MLX's."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        defines: tuple[str, ...],
        mutable_inputs: frozenset[str],
        conditions: Conditions,
        check_address_spaces: bool,
    ) -> None:
        self.name = name
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self.defines = defines
        self.mutable_inputs = mutable_inputs
        self.conditions = conditions
        self.check_address_spaces = check_address_spaces
        self.statistics: Statistics | None = None  # of the last call

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: TemplateArguments | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Runs now, on this thread, whatever ``stream`` says. Outputs that a kernel leaves unwritten are NaN.

        Raises:
            CompileError: the source is not Metal.
            KernelError: the kernel did what it must not.
        """
        self._check_length("inputs", inputs, self.input_names)
        self._check_length("output_shapes", output_shapes, self.output_names)
        self._check_length("output_dtypes", output_dtypes, self.output_names)
        arrays = dict(zip(self.input_names, map(self._as_input, self.input_names, inputs), strict=True))
        dtypes = dict(zip(self.output_names, output_dtypes, strict=True))
        shapes = dict(zip(self.output_names, output_shapes, strict=True))
        kernel = generate(
            *(self.name, self.source, self.header, list(arrays.items()), list(dtypes.items())),
            *(template or (), self.atomic_outputs),
        )
        if verbose:
            print(f"Generated source code for `{self.name}`:\n{kernel.metal}")
        program = compile_kernel(
            *(kernel.metal, kernel.expression),
            defines=self.defines,
            fuse_multiply_add=self.conditions.fuse_multiply_add,
            check_address_spaces=self.check_address_spaces,
        )
        results = {name: self._result(shapes[name], dtypes[name], init_value) for name in self.output_names}
        buffers = {
            i: self._output_buffer(argument.name, results, init_value)
            if argument.part == "output"
            else self._input_buffer(argument, arrays[argument.name])
            for i, argument in enumerate(kernel.arguments)
        }
        self.statistics = launch(
            program, buffers, grid=grid, threadgroup=threadgroup, conditions=self.conditions
        )
        return [_as_mlx(results[name], dtypes[name]) for name in self.output_names]

    def _check_length(self, what: str, values: Sequence[Any], names: Sequence[str]) -> None:
        if len(values) != len(names):
            raise ValueError(
                f"[metal_kernel] {what}: {len(values)} for {len(names)} names ({', '.join(names)})"
            )

    def _as_input(self, name: str, value: Any) -> mx.array | SparseArray:
        if isinstance(value, SparseArray):
            return value
        array = value if isinstance(value, mx.array) else mx.array(value)
        mx.eval(array)
        contiguous = _is_row_contiguous(array)
        if name in self.mutable_inputs and not contiguous:
            raise EmulatorError(
                f"'{name}' is written in place, so it must be row contiguous: a copy would be lost"
            )
        return mx.contiguous(array) if self.ensure_row_contiguous and not contiguous else array

    def _input_buffer(self, argument: Argument, array: mx.array | SparseArray) -> Buffer:
        name = argument.name
        if argument.part == "shape":
            return Buffer(np.array(array.shape, np.int32), f"{name}_shape")
        if argument.part == "ndim":
            return Buffer(np.array(array.ndim, np.int32), f"{name}_ndim")
        view = array.array if isinstance(array, SparseArray) else _memory(array)
        if argument.part == "strides":
            return Buffer(np.array(view.strides, np.int64) // view.itemsize, f"{name}_strides")
        file = array.file if isinstance(array, SparseArray) else -1
        return Buffer(_span(view), name, writable=name in self.mutable_inputs, file=file)

    def _result(self, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Array:
        blank = np.array(mx.zeros((1,), dtype).view(_BITS.get(dtype, dtype)))
        result = np.empty(tuple(shape), blank.dtype)
        if init_value is not None:
            result[...] = _memory(mx.array(init_value, dtype))
        return result

    def _output_buffer(self, name: str, results: Mapping[str, Array], init_value: float | None) -> Buffer:
        if init_value is None:
            return output(results[name], name)
        return Buffer(results[name], name, writable=True)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    mutable_inputs: Sequence[str] = (),
    conditions: Conditions = STRICT,
    check_address_spaces: bool = True,
) -> MetalKernel:
    """As ``mx.fast.metal_kernel``, and three arguments more.

    Args:
        mutable_inputs: inputs that the kernel writes in place, through a cast. The caller's arrays change; a
            write to any other input is a fault.
        conditions: rules, and choices that Metal leaves open.
        check_address_spaces: whether to compile a second time, for the address spaces.
    """
    if not output_names:
        raise ValueError("[metal_kernel] a kernel needs at least one output")
    unknown = set(mutable_inputs) - set(input_names)
    if unknown:
        raise ValueError(f"[metal_kernel] mutable_inputs names no input: {', '.join(sorted(unknown))}")
    mode = _math_mode(compile_options or {})
    return MetalKernel(
        *(name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs),
        *(("__FAST_MATH__=1",) if mode == "fast" else (), frozenset(mutable_inputs), conditions),
        check_address_spaces,
    )


def _math_mode(options: Mapping[str, str]) -> str:
    if unknown := set(options) - {"math_mode"}:
        raise ValueError(f"[metal_kernel] unknown compile option: {', '.join(sorted(unknown))}")
    mode = options.get("math_mode", "safe")
    if mode not in _MATH_MODES:
        raise ValueError(f"[metal_kernel] math_mode is one of {', '.join(_MATH_MODES)}, not {mode!r}")
    return mode


def emulate(
    *,
    mutable_inputs: Mapping[str, Sequence[str]] | None = None,
    conditions: Conditions = STRICT,
) -> Callable[..., MetalKernel]:
    """A replacement for ``mx.fast.metal_kernel`` to patch in.

    ``mutable_inputs`` gives the inputs that a kernel writes in place, by the kernel's name.
    """

    def make(name: str, *args: Any, **options: Any) -> MetalKernel:
        options.setdefault("mutable_inputs", (mutable_inputs or {}).get(name, ()))
        return metal_kernel(name, *args, conditions=conditions, **options)

    return make


def _memory(array: mx.array) -> Array:
    """The array's own memory, strides included; bfloat16 as its bits."""
    view: Array = np.array(array.view(_BITS.get(array.dtype, array.dtype)), copy=False)
    return view


def _is_row_contiguous(array: mx.array) -> bool:
    return bool(_memory(array).flags.c_contiguous)


def _span(view: Array) -> Array:
    """All memory from the first element to the last, in order: what the kernel's pointer points to."""
    if view.flags.c_contiguous or not view.size:
        return view
    if min(view.strides) < 0:
        raise EmulatorError("inputs with negative strides are not supported")
    elements = (
        sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)) // view.itemsize + 1
    )
    return np.lib.stride_tricks.as_strided(view, (elements,), (view.itemsize,))


def _as_mlx(result: Array, dtype: mx.Dtype) -> mx.array:
    array = mx.array(result)
    return array if array.dtype == dtype else array.view(dtype)
