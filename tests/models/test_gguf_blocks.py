"""What is decoded equals what the ``gguf`` package, which comes from llama.cpp's makers, dequantises."""

import gguf
import numpy as np
import pytest
from models.gguf_files import HALVES, K_QUANTS, PACKED, QUANTISED, encode, random_blocks

from mlx_paged_attention.models.gguf_blocks import QUANTISED as DECODED
from mlx_paged_attention.models.gguf_blocks import decode
from mlx_paged_attention.models.gguf_header import BLOCKS

ROWS, COLUMNS = 7, 768


def dequantised(kind, data):
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


def test_every_quantised_type_that_is_let_in_has_a_decoder():
    assert set(DECODED) == set(QUANTISED) == set(BLOCKS) - {"F32", "F16", "BF16"}
    for kind, size in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == size


@pytest.mark.parametrize("kind", PACKED)
def test_values_of_a_random_matrix_are_equal_to_the_last_bit(kind):
    matrix = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    data = encode(kind, matrix)
    np.testing.assert_array_equal(decode(kind, data).floats(), dequantised(kind, data))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_values_of_random_bits_are_equal_to_the_last_bit(kind):
    data = random_blocks(kind, ROWS, COLUMNS, std=1.0)
    expected = dequantised(kind, data)
    assert len(np.unique(expected)) > 50, "many scales and values occur"
    np.testing.assert_array_equal(decode(kind, data).floats(), expected)


@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("kind", QUANTISED)
def test_the_smallest_and_largest_integers_are_right(kind, fill):
    blocks = np.full((2, 3, BLOCKS[kind][1]), fill, dtype=np.uint8)
    for start in HALVES.get(kind, [0, 2] if kind.endswith("_1") else [0]):
        blocks[..., start : start + 2] = np.array([-0.25], dtype="<f2").view(np.uint8)
    data = blocks.reshape(2, -1)
    np.testing.assert_array_equal(decode(kind, data).floats(), dequantised(kind, data))


def test_the_parts_multiply_out_to_the_values():
    groups = decode("Q4_K", random_blocks("Q4_K", ROWS, COLUMNS, std=1.0))
    assert groups.values.shape == (ROWS, COLUMNS // 32, 32)
    assert groups.scales.shape == groups.biases.shape == (ROWS, COLUMNS // 32)
    assert groups.values.dtype == np.uint8
    assert groups.values.max() == 15
