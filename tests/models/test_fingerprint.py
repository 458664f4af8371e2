import os
import shutil

import pytest

import mlx_paged_attention.models.fingerprint as module
from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.models.fingerprint import model_fingerprint

CONFIG = {"model_type": "llama", "rope_theta": 10000.0}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(5000))
    return path


def test_it_is_256_bits_in_hex_and_repeats(weights):
    first = model_fingerprint([weights], CONFIG, "float32")
    assert len(bytes.fromhex(first)) == 32
    assert model_fingerprint([weights], CONFIG, "float32") == first


def test_equal_content_elsewhere_is_the_same_model(weights, tmp_path):
    other = tmp_path / "elsewhere" / "weights-1.safetensors"
    other.parent.mkdir()
    shutil.copy(weights, other)
    assert model_fingerprint([other], CONFIG, "float32") == model_fingerprint([weights], CONFIG, "float32")


def test_other_weights_under_the_same_name_are_another_model(weights):
    before = model_fingerprint([weights], CONFIG, "float32")
    content = bytearray(weights.read_bytes())
    content[2500] ^= 1
    replacement = weights.with_suffix(".new")
    replacement.write_bytes(content)
    os.utime(replacement, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns))
    replacement.replace(weights)  # same path, size and time; another inode
    assert model_fingerprint([weights], CONFIG, "float32") != before


def test_weights_edited_in_place_are_another_model(weights):
    before = model_fingerprint([weights], CONFIG, "float32")
    stat = weights.stat()
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_fingerprint([weights], CONFIG, "float32") != before


def test_dtype_and_configuration_count(weights):
    values = {
        model_fingerprint([weights], CONFIG, "float32"),
        model_fingerprint([weights], CONFIG, "float16"),
        model_fingerprint([weights], CONFIG | {"rope_theta": 5000.0}, "float32"),
        model_fingerprint([weights, weights], CONFIG, "float32"),
    }
    assert len(values) == 4


def test_the_content_is_read_once(weights, monkeypatch):
    first = model_fingerprint([weights], CONFIG, "float32")
    monkeypatch.setattr(module.hashlib, "file_digest", None)
    assert model_fingerprint([weights], CONFIG, "float32") == first


def test_a_file_that_changes_meanwhile_is_refused(weights, monkeypatch):
    real = module.hashlib.file_digest

    def slow(file, name):
        digest = real(file, name)
        weights.write_bytes(b"something else")
        return digest

    monkeypatch.setattr(module.hashlib, "file_digest", slow)
    with pytest.raises(ModelLoadError, match="changed while it was being read"):
        model_fingerprint([weights], CONFIG, "float32")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot fingerprint"):
        model_fingerprint([tmp_path / "none"], CONFIG, "float32")
