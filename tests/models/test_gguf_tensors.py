import gguf
import mlx.core as mx
import numpy as np
import pytest
from models.gguf_files import QUANTISED, encode

from mlx_paged_attention.models import gguf_tensors
from mlx_paged_attention.models.gguf_header import TensorInfo
from mlx_paged_attention.models.gguf_tensors import (
    PACKED_BITS,
    REQUANTISED_BITS,
    GGUFData,
    held_bytes,
    pack,
)

ROWS, COLUMNS = 24, 512
BITS = PACKED_BITS | REQUANTISED_BITS


@pytest.fixture(params=[False, True], ids=["at once", "in chunks"])
def chunks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(gguf_tensors, "_CHUNK", 5 * COLUMNS)


@pytest.fixture
def tensor(tmp_path):
    """Stores a random matrix; returns the tensor, its data and the values they stand for."""

    def store(kind, shape=(ROWS, COLUMNS)):
        matrix = np.random.default_rng(0).normal(size=(int(np.prod(shape[:-1])), shape[-1]))
        data = encode(kind, matrix.astype(np.float32))
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        path = tmp_path / f"{kind}.bin"
        path.write_bytes(b"head" + data.tobytes() + b"tail")
        return TensorInfo("a", kind, shape, 4, data.nbytes), GGUFData(path), values.reshape(shape)

    return store


def plain(parts, kind):
    return np.array(
        mx.dequantize(
            parts["weight"], parts["scales"], parts["biases"], group_size=32, bits=BITS[kind]
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*QUANTISED, "F16", "BF16"])
def test_expanded_values_are_exact(kind, tensor, chunks):
    info, data, values = tensor(kind)
    parts = data.read(info, expand=True, float_type=mx.float32)
    assert parts.keys() == {"weight"}
    assert parts["weight"].nbytes == held_bytes(info, expand=True, float_bytes=4)
    np.testing.assert_array_equal(np.array(parts["weight"]), values)


@pytest.mark.parametrize("kind", PACKED_BITS)
def test_groups_of_32_are_packed_as_they_are(kind, tensor, chunks):
    info, data, values = tensor(kind)
    parts = data.read(info, expand=False, float_type=mx.float32)
    assert sum(part.nbytes for part in parts.values()) == held_bytes(info, expand=False, float_bytes=4)
    # MLX may fuse the product and the sum, which differs by a rounding.
    np.testing.assert_allclose(plain(parts, kind), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", REQUANTISED_BITS)
def test_groups_of_16_lose_a_tenth_of_their_own_step(kind, tensor, chunks):
    info, data, values = tensor(kind)
    parts = data.read(info, expand=False, float_type=mx.float32)
    assert sum(part.nbytes for part in parts.values()) == held_bytes(info, expand=False, float_bytes=4)
    stored_bits = int(kind[1])
    groups = values.reshape(-1, 32)
    span = (groups.max(axis=1) - groups.min(axis=1)) / (2**stored_bits - 1)
    error = np.abs(plain(parts, kind).reshape(-1, 32) - groups).max(axis=1)
    assert (error / span).max() < 0.3
    assert np.mean(error / span) < 0.2


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_tensors_of_three_dimensions_keep_their_shape(kind, tensor):
    info, data, values = tensor(kind, (3, 8, 256))
    packed = data.read(info, expand=False, float_type=mx.float32)
    np.testing.assert_allclose(plain(packed, kind), values, atol=0.1)
    expanded = data.read(info, expand=True, float_type=mx.float16)["weight"]
    assert (expanded.shape, expanded.dtype) == ((3, 8, 256), mx.float16)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packing_is_what_mlx_unpacks(bits):
    values = np.random.default_rng(1).integers(0, 2**bits, (6, 96)).astype(np.uint8)
    ones = mx.ones((6, 3))
    got = mx.dequantize(mx.array(pack(values, bits)), ones, ones * 0, group_size=32, bits=bits)
    np.testing.assert_array_equal(np.array(got), values)
