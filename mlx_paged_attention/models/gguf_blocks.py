"""GGML's block formats: stored bytes to small integers in groups, each group with a scale and a bias.

Every format that can be loaded is ``value = scale * q + bias`` within groups of 16 or 32 values, if the parts
of its scales are multiplied out, which float32 does exactly. So one description serves for floats and
for MLX's affine format, which has groups of 32 (``gguf_tensors.py`` makes either).

Layouts: https://github.com/ggml-org/ggml, src/ggml-common.h (``block_q4_0`` and so on) and
``dequantize_row_*`` in src/ggml-quants.c. Arrays here are ``[rows, blocks, bytes]``; all rows are decoded at
once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_paged_attention.models.gguf_header import BLOCKS

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of quantised values.

    Attributes:
        values: ``[rows, groups, group_size]`` uint8.
        scales: ``[rows, groups]`` float32.
        biases: ``[rows, groups]`` float32.
    """

    values: Array
    scales: Array
    biases: Array

    def floats(self) -> Array:
        """``[rows, columns]`` float32."""
        floats = self.values.astype(np.float32)
        floats *= self.scales[..., None]
        floats += self.biases[..., None]
        return floats.reshape(len(floats), -1)


def decode(kind: str, data: Array) -> Groups:
    """The values of ``data``, ``[rows, bytes]`` uint8 of GGML type ``kind``, one of ``QUANTISED``."""
    rows = len(data)
    parts = _DECODERS[kind](data.reshape(rows, -1, BLOCKS[kind][1]))
    values, scales, biases = parts
    flat = (rows, -1)
    return Groups(
        values.reshape(rows, -1, values.shape[-1]),
        scales.astype(np.float32).reshape(flat),
        biases.astype(np.float32).reshape(flat),
    )


# values [rows, blocks, groups, group_size], scales and biases [rows, blocks, groups]
_Parts = tuple[Array, Array, Array]


def _half(blocks: Array, start: int) -> Array:
    """The float16 at a byte of every block, as float32 ``[rows, blocks, 1]``."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """``[..., n]`` bytes to ``[..., 2, n]``: all low halves, then all high ones."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _fields(packed: Array, width: int) -> Array:
    """``[..., n]`` bytes to ``[..., 8 / width, n]``: the lowest ``width`` bits, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields: Array = (packed[..., None, :] >> shifts) & ((1 << width) - 1)
    return fields


def _q4_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _one_group(_nibbles(blocks[..., 2:])), scale, -8 * scale


def _q4_1(blocks: Array) -> _Parts:
    return _one_group(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _five_bits(blocks[..., 2:6], blocks[..., 6:]), scale, -16 * scale


def _q5_1(blocks: Array) -> _Parts:
    return _five_bits(blocks[..., 4:8], blocks[..., 8:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return (blocks[..., 2:] ^ 128)[..., None, :], scale, -128 * scale  # int8 + 128


def _one_group(halves: Array) -> Array:
    return halves.reshape(*halves.shape[:-2], 1, -1)


def _five_bits(high: Array, low: Array) -> Array:
    fifth = np.unpackbits(high, axis=-1, bitorder="little")  # one bit for each of 32 values
    values: Array = _one_group(_nibbles(low))[..., 0, :] | fifth << 4
    return values[..., None, :]


def _q2_k(blocks: Array) -> _Parts:
    packed_scales, quants = blocks[..., :16], blocks[..., 16:80]
    scale, minimum = _half(blocks, 80), _half(blocks, 82)
    values = _fields(quants.reshape(*quants.shape[:-1], 2, 32), 2)
    return _sixteens(values), scale * (packed_scales & 15), -minimum * (packed_scales >> 4)


def _q3_k(blocks: Array) -> _Parts:
    high, quants, packed_scales = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    low_scales = _nibbles(packed_scales[..., :8])  # [.., 2, 8]
    high_scales = _fields(packed_scales[..., 8:], 2)  # [.., 4, 4]
    six_bits = low_scales.reshape(*low_scales.shape[:-2], 16)
    six_bits = six_bits | high_scales.reshape(six_bits.shape) << 4
    scale = _half(blocks, 108) * (six_bits.astype(np.int8) - 32)
    values = _fields(quants.reshape(*quants.shape[:-1], 2, 32), 2)  # [.., 2, 4, 32]
    third = _fields(high, 1)  # [.., 8, 32], bit after bit
    values = values | third.reshape(values.shape) << 2
    return _sixteens(values), scale, -4 * scale


def _q4_k(blocks: Array) -> _Parts:
    scales, biases = _k_scales(blocks)
    quants = blocks[..., 16:]
    values = _nibbles(quants.reshape(*quants.shape[:-1], 4, 32))  # [.., 4, 2, 32]
    return values.reshape(*scales.shape, 32), scales, biases


def _q5_k(blocks: Array) -> _Parts:
    scales, biases = _k_scales(blocks)
    high, quants = blocks[..., 16:48], blocks[..., 48:]
    values = _nibbles(quants.reshape(*quants.shape[:-1], 4, 32)).reshape(*scales.shape, 32)
    return values | _fields(high, 1) << 4, scales, biases


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and biases of the eight groups of Q4_K and Q5_K: 6 bits of each, spread over 12 bytes."""
    scale, minimum, packed = _half(blocks, 0), _half(blocks, 2), blocks[..., 4:16]
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=-1)
    minimums = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=-1)
    return scale * factors, -minimum * minimums


def _q6_k(blocks: Array) -> _Parts:
    low, high = blocks[..., :128], blocks[..., 128:192]
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scale = _half(blocks, 208) * factors
    values = _nibbles(low.reshape(*low.shape[:-1], 2, 64))  # [.., 2, 2, 64]
    top = _fields(high.reshape(*high.shape[:-1], 2, 32), 2)  # [.., 2, 4, 32]
    values = values.reshape(top.shape) | top << 4
    return _sixteens(values), scale, -32 * scale


def _sixteens(values: Array) -> Array:
    return values.reshape(*values.shape[:2], 16, 16)


_DECODERS: dict[str, Callable[[Array], _Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
QUANTISED = tuple(_DECODERS)
