"""llama.cpp's programs: what they are asked, and what is read from what they print."""

from pathlib import Path

import pytest

from mlx_paged_attention.bench.llama_cpp import LlamaCpp
from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.errors import InvalidRequestError, MlxPagedError
from mlx_paged_attention.models.source import ModelSource

GGUF = ModelSource("gguf", Path("model.gguf"), "model")
LOAD = Load([[1] * 512] * 8, 65)

BATCHED = """
build: 1234 (abcdef) with cc
main: n_kv_max = 8192, n_batch = 2048, n_ubatch = 512, flash_attn = -1, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |     64 |    8 |   4608 |   20.000 |   204.80 |    6.400 |    80.00 |   26.400 |   174.55 |
"""


def program(directory, name, output, *, status=0):
    """A shell script that prints ``output`` and writes its arguments to ``arguments``."""
    path = directory / name
    (directory / "output").write_text(output)
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {directory}/arguments\ncat {directory}/output\n'
        f"echo it broke >&2\nexit {status}\n"
    )
    path.chmod(0o755)
    return path


def start(path, source=GGUF):
    return LlamaCpp(path, source, threads=2, on_cpu=True)


def test_the_batched_programs_row_becomes_token_times(tmp_path):
    llama = start(program(tmp_path, "llama-batched-bench", BATCHED))
    timing = llama.run(LOAD)
    assert [len(times) for times in timing.token_times] == [65] * 8
    assert timing.last_first_token == pytest.approx(20.0)
    assert timing.elapsed == pytest.approx(26.4)
    assert timing.decode_step() == pytest.approx(0.1)
    arguments = (tmp_path / "arguments").read_text()
    # 512 + 64 tokens, each sequence's context rounded up to 768.
    assert arguments == "-m model.gguf -t 2 -ngl 0 -c 6144 -npp 512 -ntg 64 -npl 8\n"


def test_the_single_program_is_asked_for_prefill_and_for_decode_behind_the_prompt(tmp_path):
    path = program(tmp_path, "llama-bench", '[{"samples_ns": [640000000], "samples_ts": [1.0]}]')
    timing = start(path).run(Load([[1] * 512], 65))
    assert timing.last_first_token == pytest.approx(0.64)
    assert timing.decode_step() == pytest.approx(0.01)
    first, second = (tmp_path / "arguments").read_text().splitlines()
    assert first.endswith("-p 512 -n 0 -r 1 -o json")
    assert second.endswith("-p 0 -n 64 -d 512 -r 1 -o json")


def test_a_table_without_the_row_that_was_asked_for_is_refused(tmp_path):
    llama = start(program(tmp_path, "llama-batched-bench", BATCHED))
    with pytest.raises(MlxPagedError, match="printed no row for 4 requests"):
        llama.run(Load([[1] * 512] * 4, 65))


@pytest.mark.parametrize("name", ["llama-batched-bench", "llama-bench"])
def test_a_program_that_fails_is_told_with_its_last_line(tmp_path, name):
    llama = start(program(tmp_path, name, "", status=3))
    with pytest.raises(MlxPagedError, match=f"{name} ended with status 3: it broke"):
        llama.run(Load([[1] * 4], 3))


def test_json_that_is_none_is_refused(tmp_path):
    with pytest.raises(MlxPagedError, match="unexpected JSON: nothing useful"):
        start(program(tmp_path, "llama-bench", "nothing useful")).run(Load([[1] * 4], 3))


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path):
    path = program(tmp_path, "llama-batched-bench", "")
    with pytest.raises(InvalidRequestError, match=r"org/name is none: give a \.gguf file") as caught:
        start(path, ModelSource("directory", tmp_path, "org/name"))
    assert caught.value.param == "llama_cpp"


@pytest.mark.parametrize("name", ["missing", "llama-cli"])
def test_another_program_is_refused(tmp_path, name):
    program(tmp_path, "llama-cli", "")
    with pytest.raises(InvalidRequestError, match=name):
        start(tmp_path / name)
