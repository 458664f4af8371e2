"""The command line: flags, environment, output and errors; on a scripted engine."""

import gc
import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_run import Started, run, started
from fake_llm import ANSWER

import mlx_paged_attention
from mlx_paged_attention.api.commands.flags import EngineFlags, SamplingFlags, parse_bytes, parse_kv_memory
from mlx_paged_attention.api.server.graceful import GracefulServer
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import ModelLoadError

FIRST = "0" + ANSWER[1:]


pytestmark = pytest.mark.usefixtures("fake_engine")


def test_generate_prints_the_answer_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "generate", "hello")
    assert (status, out) == (0, FIRST + "\n")
    assert "loading" in err
    assert "100 blocks of 16 tokens (and the null block), 1.0 KiB per token, pool 1.6 MiB" in err
    assert "float32 on cpu, row layout" in err
    assert "holds 6.2 that long" in err
    assert "5 prompt tokens, 45 generated" in err
    assert started().closed


def test_several_prompts_and_answers_are_labelled_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "generate", "one\nline", "two", "--max-tokens", "4")
    assert out == "=== prompt 1: one line\n0he \n\n=== prompt 2: two\n0he \n\n"
    _, out, _ = run(capsys, "generate", "one", "--n", "2", "--max-tokens", "4")
    assert out == "=== prompt 1, answer 1: one\n0he \n\n=== prompt 1, answer 2: one\n1he \n\n"


def test_a_prompt_may_come_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run(capsys, "generate", "--max-tokens", "2")[1] == "0h\n"
    assert bytes(started().prompts[0]) == b"two\nlines"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    status, _, err = run(capsys, "generate")
    assert status == 2
    assert "no prompt" in err


def test_chat_flag_puts_the_prompt_through_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "generate", "--chat", "hi")
    assert bytes(started().prompts[0]) == b"<user>hi<assistant>"


def test_every_engine_flag_arrives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """jundot/omlx#2242, waybarrios/vllm-mlx#469"""
    monkeypatch.setattr(GracefulServer, "run", lambda *_, **__: None)
    given = {
        "model": ("org/name", "org/name"),
        "dtype": ("float16", "float16"),
        "max_model_len": ("100", 100),
        "max_num_seqs": ("7", 7),
        "max_num_batched_tokens": ("77", 77),
        "adapter_path": ("some/where", "some/where"),
        "block_size": ("8", 8),
        "kv_memory": ("2MiB", 2 << 20),
        "kv_idle_seconds": ("2.5", 2.5),
        "scheduling_policy": ("priority", "priority"),
        "max_overtaken_seconds": ("2.5", 2.5),
        "watchdog_seconds": ("60", 60.0),
        "seed": ("5", 5),
        "device": ("cpu", "cpu"),
        "enable_prefix_caching": (None, False),
        "skip_tokenizer_init": (None, True),
    }
    assert {field.name for field in fields(EngineFlags)} == {field.name for field in fields(EngineConfig)}
    assert {*given, "num_blocks"} == {field.name for field in fields(EngineConfig)}
    arguments = []
    for name, (text, value) in given.items():
        arguments.append(("--no-" if value is False else "--") + name.replace("_", "-"))
        arguments += [] if text is None else [text]
    assert run(capsys, "serve", "--port", "0", *arguments)[0] == 0
    for name, (_, value) in given.items():
        assert getattr(started().options, name) == value, name
    for flag in ("--num-blocks", "--num-gpu-blocks-override"):
        run(capsys, "generate", "x", flag, "9")
        assert started().options.num_blocks == 9


def test_what_loading_made_is_out_of_the_collectors_way_while_a_server_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(GracefulServer, "run", lambda *_, **__: counts.append(gc.get_freeze_count()))
    assert run(capsys, "serve", "--port", "0")[0] == 0
    assert counts[0] > 1000
    assert gc.get_freeze_count() == 0


def test_every_sampling_flag_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["a", "b"],
    }
    assert set(given) == {field.name for field in fields(SamplingFlags)}
    arguments = ["--stop", "a", "--stop", "b", "--ignore-eos"]
    for name, value in list(given.items())[:-2]:
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    assert run(capsys, "generate", *arguments, "x")[0] == 0
    (params,) = started().params
    for name, value in given.items():
        assert getattr(params, name) == value, name


def test_a_flag_counts_more_than_the_environment_and_that_more_than_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "generate", "x")
    assert started().options.block_size == 16
    monkeypatch.setenv("MLX_PAGED_BLOCK_SIZE", "32")
    monkeypatch.setenv("MLX_PAGED_KV_MEMORY", "1GB")
    monkeypatch.setenv("MLX_PAGED_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("MLX_PAGED_TEMPERATURE", "0.25")
    run(capsys, "generate", "x", "--kv-memory", "5")
    options = started().options
    assert (options.block_size, options.kv_memory, options.enable_prefix_caching) == (32, 5, False)
    assert started().params[0].temperature == 0.25


def test_the_models_own_defaults_come_before_ours_and_after_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "generate", "x")
    assert (started().params[0].temperature, started().params[0].max_tokens) == (0.0, 256)

    def started_with_config(**options: Any) -> Started:
        llm = Started(**options)
        llm.generation_config = {"temperature": 0.6, "top_k": 20}
        return llm

    monkeypatch.setattr("mlx_paged_attention.api.async_llm.AsyncLLM", started_with_config)
    run(capsys, "generate", "x", "--top-k", "3")
    assert (started().params[0].temperature, started().params[0].top_k) == (0.6, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temprature", "1"], "--temprature"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "many"], "many"),
        (["generate", "x", "--block-size", "0"], "--block-size"),
        (["generate", "x", "--dtype", "int8"], "int8"),
        (["generate", "x", "--kv-memory", "50%"], "such as 0.5"),
        (["generate", "x", "--kv-memory", "0"], "or a fraction"),
        (["generate", "x", "--kv-memory", "1GB", "--num-blocks", "5"], "not both"),
        (["generate", "x", "--n", "0"], "--n"),
        (["serve", "--port", "99999"], "99999"),
        (["serve", "--served-model-name", ""], "--served-model-name is empty"),
        (["serve", "some/model"], "serve does not take 'some/model'"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("mlx-paged: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise ModelLoadError("shard 2\nis missing")

    monkeypatch.setattr("mlx_paged_attention.api.async_llm.AsyncLLM", fail)
    for command in (["generate", "x"], ["chat"], ["serve", "--port", "0"]):
        status, out, err = run(capsys, *command)
        assert (status, out, err) == (2, "", "mlx-paged: error: shard 2 is missing\n")


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, err = run(capsys, "serve", "--port", str(taken.getsockname()[1]))
    assert status == 2
    assert "choose another --port" in err
    assert Started.last is None


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "top", "doctor"])
def test_help_lists_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"mlx-paged {command}" in out.split("Examples:")[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("4GB", 4 * 10**9),
        ("4g", 4 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("7B", 7),
        ("2KiB", 2048),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "5iB", "1e9", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), (".25", 0.25), ("1.0", 1.0), ("1", 1), ("1.5", 1.5), ("0.5GiB", 1 << 29), ("512", 512)],
)
def test_memory_for_the_pool_is_bytes_or_a_fraction(text: str, value: float) -> None:
    parsed = parse_kv_memory(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_fraction_reaches_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "generate", "x", "--kv-memory", "0.7")
    assert started().options.kv_memory == 0.7
    for refused in ("0.0", "1.5"):
        assert "a fraction above 0.0" in run(capsys, "generate", "x", "--kv-memory", refused)[2]


def test_the_version_is_the_same_by_every_entry(capsys: pytest.CaptureFixture[str]) -> None:
    """jjang-ai/mlxstudio#76"""
    script = Path(sys.executable).with_name("mlx-paged")
    by_script = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    by_module = subprocess.run(
        [sys.executable, "-m", "mlx_paged_attention", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert by_script == by_module == run(capsys, "--version")[1] == f"{mlx_paged_attention.__version__}\n"


def test_the_command_line_starts_without_mlx() -> None:
    code = (
        "import sys; from mlx_paged_attention.api import cli; cli.run(['--help']);"
        "from mlx_paged_attention.api.server import app; print('mlx.core' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_chat_on_a_pipe_answers_every_line_and_keeps_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nagain\n/clear\nnew"))
    status, out, _ = run(capsys, "chat", "--system-prompt", "Be.", "--max-tokens", "3")
    assert (status, out) == (0, "0he\n" * 3)
    prompts = [bytes(ids).decode() for ids in started().prompts]
    assert prompts == [
        "<system>Be.<user>hi<assistant>",
        "<system>Be.<user>hi<assistant>0he<user>again<assistant>",
        "<system>Be.<user>new<assistant>",
    ]


def test_a_conversation_that_grows_too_long_on_a_pipe_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 300))
    status, out, err = run(capsys, "chat")
    assert (status, out) == (2, "")
    assert "317" in err


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_api_key_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    status, out, err = run(capsys, "serve", "--port", "0", "--api-key", "good", "--api-key", key)
    assert (status, out) == (2, "")
    assert err.startswith("mlx-paged: error: --api-key is empty")


def test_doctor_reports_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "problems       none" in out
    assert mlx_paged_attention.__version__ in out
    status, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert (status, report["problems"]) == (0, [])
    assert set(report) == {
        *("version", "location", "python", "machine", "packages", "backend", "blas"),
        *("cache", "default model", "problems"),
    }
    assert "error" not in report["backend"]


def test_doctor_ends_with_1_when_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_paged_attention.api.commands.doctor.problems", lambda facts: ["no back end"])
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "problem        no back end" in out
