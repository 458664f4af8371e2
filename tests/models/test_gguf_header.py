import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.models.gguf_header import TensorInfo, read_gguf_header


@pytest.fixture
def small(tmp_path):
    """A GGUF file with every kind of value."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint64("u64", 1 << 40)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Ġé🙂")
    writer.add_array("strings", ["a", "", "Ġb"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("none", [])
    writer.add_tensor("a.weight", np.zeros((3, 64), dtype=np.float32))
    packed = gguf.quants.quantize(np.ones((2, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors_are_read_as_written(small):
    header = read_gguf_header(small)
    metadata = header.metadata
    assert header.version == 3
    assert metadata["general.architecture"] == "llama"
    assert (metadata["u8"], metadata["i8"]) == (200, -5)
    assert (metadata["u64"], metadata["i64"]) == (1 << 40, -(1 << 40))
    assert (metadata["f32"], metadata["f64"]) == (0.5, 0.1)
    assert metadata["yes"] is True
    assert metadata["text"] == "Ġé🙂"
    assert metadata["strings"] == ["a", "", "Ġb"]
    assert metadata["numbers"] == [1, -2, 3]
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    first, second = header.tensors
    assert first == TensorInfo("a.weight", "F32", (3, 64), reference["a.weight"].data_offset, 768)
    assert second == TensorInfo("b.weight", "Q8_0", (2, 64), reference["b.weight"].data_offset, 2 * 2 * 34)
    assert header.file_size == small.stat().st_size


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        read_gguf_header(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF\x03\0\0\0"])
def test_a_stump_is_refused(content, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError):
        read_gguf_header(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"cannot read .*none\.gguf"):
        read_gguf_header(tmp_path / "none.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_refused(version, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelLoadError, match=f"version {version}"):
        read_gguf_header(path)


def entry(key, kind, payload):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


@pytest.mark.parametrize(
    "claim",
    [
        struct.pack("<QQ", 1 << 60, 0),  # tensors
        struct.pack("<QQ", 0, 1 << 60),  # keys
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62),  # length of a key
        struct.pack("<QQ", 0, 1) + entry(b"k", 8, struct.pack("<Q", 1 << 40)),  # length of a string
        struct.pack("<QQ", 0, 1) + entry(b"k", 9, struct.pack("<IQ", 4, 1 << 50)),  # numbers in an array
        struct.pack("<QQ", 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 1 << 50)),  # strings in an array
        struct.pack("<QQ", 0, 1) + entry(b"k", 9, struct.pack("<IQ", 9, 1)),  # array of arrays
        struct.pack("<QQ", 0, 1) + entry(b"k", 77, b""),  # unknown type
        struct.pack("<QQ", 0, 1) + entry(b"\xff", 7, b"\1"),  # key that is not UTF-8
    ],
)
def test_absurd_counts_are_refused_without_allocating_for_them(claim, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + claim + bytes(64))
    with pytest.raises(ModelLoadError, match="damaged or cut short"):
        read_gguf_header(path)


def test_a_header_cut_anywhere_is_refused(small):
    whole = small.read_bytes()
    start = min(tensor.offset for tensor in read_gguf_header(small).tensors)
    end_of_table = len(whole[:start].rstrip(b"\0"))
    for length in range(end_of_table):
        small.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            read_gguf_header(small)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused_but_never_crash(data, small):
    whole = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    broken = small.with_suffix(".broken")
    broken.write_bytes(whole)
    try:
        header = read_gguf_header(broken)
    except ModelLoadError:
        return
    assert isinstance(header.metadata, dict)


@pytest.mark.model
def test_the_default_models_header_is_read_in_half_a_second(smollm2_source):
    start = time.perf_counter()
    header = read_gguf_header(smollm2_source.path)
    assert time.perf_counter() - start < 0.5
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert header.metadata["tokenizer.ggml.merges"][0] == "Ġ t"
    assert len(header.tensors) == 272
