"""One tensor of a GGUF file as MLX arrays: floats, or MLX's packed affine format.

The affine format with groups of 32 is ``weight [out, in * bits / 32]`` uint32, every row a stream of
``bits``-wide values from the lowest bit up, with ``scales`` and ``biases`` ``[out, in / 32]``. GGML's formats
with groups of 32 fit it as they are. Those with groups of 16 are quantised anew with two bits more: the error
is about a tenth of the steps that the format had left.
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged_attention.models.gguf_blocks import QUANTISED, Array, decode
from mlx_paged_attention.models.gguf_header import TensorInfo
from mlx_paged_attention.ops.host_memory import reserve

GROUP_SIZE = 32
# Bits per value of the formats that fit, and of those that are quantised anew.
PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
REQUANTISED_BITS = {"Q2_K": 4, "Q3_K": 5, "Q6_K": 8}

_CHUNK = 1 << 22  # values decoded at a time: what lies between bytes and result stays small


class GGUFData:
    """The tensor data of a GGUF file, mapped: pages are read when a tensor is, and never kept."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def read(self, tensor: TensorInfo, *, expand: bool, float_type: mx.Dtype) -> dict[str, mx.array]:
        """The tensor by suffix of its parameters: ``weight`` alone, or with ``scales`` and ``biases``.

        Args:
            tensor: of a loadable type, complete in the file.
            expand: quantised tensors become floats; otherwise they stay packed.
            float_type: of floats, scales and biases.
        """
        assert tensor.nbytes is not None
        data = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.type not in QUANTISED:
            return {"weight": _floats(tensor, data).astype(float_type)}
        rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
        if expand:
            return {"weight": _expanded(tensor, rows).reshape(tensor.shape).astype(float_type)}
        parts = (_requantised if tensor.type in REQUANTISED_BITS else _packed)(tensor, rows)
        weight, scales, biases = (part.reshape(*tensor.shape[:-1], -1) for part in parts)
        return {"weight": weight, "scales": scales.astype(float_type), "biases": biases.astype(float_type)}


def held_bytes(tensor: TensorInfo, *, expand: bool, float_bytes: int) -> int:
    """Memory that the arrays of :meth:`GGUFData.read` take, in bytes."""
    if expand or tensor.type not in QUANTISED:
        return tensor.size * float_bytes
    bits = (PACKED_BITS | REQUANTISED_BITS)[tensor.type]
    return tensor.size * bits // 8 + 2 * tensor.size // GROUP_SIZE * float_bytes


def _floats(tensor: TensorInfo, data: Array) -> mx.array:
    if tensor.type == "BF16":  # numpy has no such type
        return mx.array(data.view("<u2").reshape(tensor.shape)).view(mx.bfloat16)
    return mx.array(data.view({"F32": "<f4", "F16": "<f2"}[tensor.type]).reshape(tensor.shape))


def _chunks(tensor: TensorInfo, rows: Array) -> list[slice]:
    step = max(1, _CHUNK // tensor.shape[-1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _expanded(tensor: TensorInfo, rows: Array) -> mx.array:
    array, floats = reserve((len(rows), tensor.shape[-1]))  # MLX would copy an array of numpy's
    for chunk in _chunks(tensor, rows):
        floats[chunk] = decode(tensor.type, rows[chunk]).floats()
    return array


def _requantised(tensor: TensorInfo, rows: Array) -> tuple[mx.array, mx.array, mx.array]:
    bits = REQUANTISED_BITS[tensor.type]
    chunks = []
    for chunk in _chunks(tensor, rows):
        floats = mx.array(decode(tensor.type, rows[chunk]).floats())
        chunks.append(mx.quantize(floats, group_size=GROUP_SIZE, bits=bits))
        mx.eval(chunks[-1])
    weight, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*chunks, strict=True))
    return weight, scales, biases


def _packed(tensor: TensorInfo, rows: Array) -> tuple[mx.array, mx.array, mx.array]:
    bits, columns = PACKED_BITS[tensor.type], tensor.shape[-1]
    weight = np.empty((len(rows), columns * bits // 32), dtype=np.uint32)
    scales, biases = np.empty((2, len(rows), columns // GROUP_SIZE), dtype=np.float32)
    for chunk in _chunks(tensor, rows):
        groups = decode(tensor.type, rows[chunk])
        weight[chunk] = pack(groups.values.reshape(len(groups.values), -1), bits)
        scales[chunk], biases[chunk] = groups.scales, groups.biases
    return mx.array(weight), mx.array(scales), mx.array(biases)


def pack(values: Array, bits: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """``[rows, columns]`` uint8 below ``2 ** bits`` as streams of bits ``[rows, columns * bits / 32]``.

    Args:
        bits: 4, 5 or 8; columns are a multiple of 32.
    """
    if bits == 8:
        stream = np.ascontiguousarray(values)
    elif bits == 4:
        stream = values[:, 0::2] | values[:, 1::2] << 4
    else:  # eight values fill whole bytes
        eights = values.reshape(len(values), -1, 8).astype("<u8") << (bits * np.arange(8, dtype=np.uint64))
        words = np.bitwise_or.reduce(eights, axis=-1)
        stream = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    return np.ascontiguousarray(stream.reshape(len(values), -1)).view("<u4")
