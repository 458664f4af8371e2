"""What the command line says about settings: in a person's own words, and before anything is loaded."""

import io
from typing import Any

import pytest
from cli_run import Started, run, started

from mlx_paged_attention.api.server.graceful import GracefulServer
from mlx_paged_attention.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("fake_engine")

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def error(capsys: Capture, *arguments: str) -> str:
    """The one line of a run that is refused before anything is loaded."""
    Started.last = None
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert Started.last is None
    assert err.count("\n") == 1
    assert err.startswith("mlx-paged: error: ")
    return err.removeprefix("mlx-paged: error: ").rstrip()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--block-size", "0"], {}, "--block-size must be an integer of at least 1, not 0"),
        (["--n", "0"], {}, "--n must be an integer from 1 to 128, not 0"),
        (["--top-p=2"], {}, "--top-p must be in (0, 1], not 2.0"),
        (
            ["--num-gpu-blocks-override", "1"],
            {},
            "--num-gpu-blocks-override must be an integer of at least 2, not 1",
        ),
        (
            ["--kv-memory", "1GB", "--num-blocks", "5"],
            {},
            "give --num-blocks or --kv-memory, not both: each fixes the pool's size",
        ),
        (
            ["--max-num-batched-tokens=4", "--max-num-seqs", "8"],
            {},
            "--max-num-batched-tokens 4 must be at least --max-num-seqs (8): "
            "every running request needs one token per step",
        ),
        (
            [],
            {"MLX_PAGED_BLOCK_SIZE": "0"},
            "MLX_PAGED_BLOCK_SIZE must be an integer of at least 1, not 0",
        ),
    ],
)
def test_a_bad_value_is_told_once_under_the_name_it_was_given_by(
    capsys: Capture, monkeypatch: Patch, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert error(capsys, "generate", "x", *arguments) == message


@pytest.mark.parametrize(
    ("arguments", "environment", "start"),
    [
        (["--kv-memory", "900GB"], {}, "--kv-memory 900GB asks for"),
        (["--kv-memory=900GB"], {}, "--kv-memory 900GB asks for"),
        ([], {"MLX_PAGED_KV_MEMORY": "900GB"}, "MLX_PAGED_KV_MEMORY=900GB asks for"),
        ([], {}, "--kv-memory (900000000000) asks for"),
    ],
)
def test_a_value_refused_while_loading_is_shown_as_it_was_given(
    capsys: Capture, monkeypatch: Patch, arguments: list[str], environment: dict[str, str], start: str
) -> None:
    def refuse(**_: Any) -> None:
        raise InvalidRequestError("kv_memory (900000000000) asks for a pool of 858306 MiB", "kv_memory")

    monkeypatch.setattr("mlx_paged_attention.api.async_llm.AsyncLLM", refuse)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert error(capsys, "generate", "x", *arguments) == f"{start} a pool of 858306 MiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty: there is nothing to continue"),
        (["a", ""], "prompt 2 is empty: there is nothing to continue"),
    ],
)
def test_an_empty_prompt_is_refused_before_anything_is_loaded(
    capsys: Capture, arguments: list[str], message: str
) -> None:
    assert error(capsys, "generate", *arguments) == message


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_commands_about_text_refuse_to_do_without_a_tokenizer(
    capsys: Capture, monkeypatch: Patch, command: list[str]
) -> None:
    words = "serves token ids only, and this command is about text: leave it out"
    assert error(capsys, *command, "--skip-tokenizer-init") == f"--skip-tokenizer-init {words}"
    monkeypatch.setenv("MLX_PAGED_SKIP_TOKENIZER_INIT", "true")
    assert error(capsys, *command) == f"MLX_PAGED_SKIP_TOKENIZER_INIT {words}"


@pytest.mark.parametrize("prompt", ["-5 degrees", "-hello", "--- a line", "-- x"])
def test_a_prompt_that_begins_with_a_dash_gets_a_hint_that_works(capsys: Capture, prompt: str) -> None:
    assert "then -- before a prompt" in error(capsys, "generate", prompt)
    assert run(capsys, "generate", "--", prompt)[0] == 0
    assert bytes(started().prompts[0]).decode() == prompt


@pytest.mark.parametrize("command", [["generate", "x", "--temprature", "1"], ["chat", "-x"]])
def test_a_mistyped_flag_gets_no_hint_about_prompts(capsys: Capture, command: list[str]) -> None:
    assert "then --" not in error(capsys, *command)


def test_variables_that_nothing_reads_are_named_in_one_warning(capsys: Capture, monkeypatch: Patch) -> None:
    for name in ("MODLE", "ZZZ", "CACHE", "BLAS", "PORT", "MAX_TOKENS", "NUM_GPU_BLOCKS_OVERRIDE"):
        monkeypatch.setenv(f"MLX_PAGED_{name}", "5")
    monkeypatch.setenv("MLX_OTHER", "1")
    status, _, err = run(capsys, "generate", "x")
    assert status == 0
    assert [line for line in err.splitlines() if "warning" in line] == [
        "mlx-paged: warning: nothing reads MLX_PAGED_MODLE, MLX_PAGED_ZZZ; see mlx-paged --help"
    ]


def test_known_variables_are_no_cause_for_a_warning(capsys: Capture, monkeypatch: Patch) -> None:
    for name in ("CACHE", "BLAS", "PORT", "NUM_GPU_BLOCKS_OVERRIDE", "SERVED_MODEL_NAME", "OUTPUT_JSON"):
        monkeypatch.setenv(f"MLX_PAGED_{name}", "5")
    assert "warning" not in run(capsys, "generate", "x")[2]


def test_help_names_the_variables_that_are_no_flags(capsys: Capture) -> None:
    _, out, _ = run(capsys, "--help")
    assert "MLX_PAGED_CACHE" in out
    assert "MLX_PAGED_BLAS" in out


@pytest.mark.parametrize("by_flag", [True, False])
def test_an_empty_model_is_none(capsys: Capture, monkeypatch: Patch, by_flag: bool) -> None:
    if not by_flag:
        monkeypatch.setenv("MLX_PAGED_MODEL", "")
    assert run(capsys, "generate", "x", *(["--model", ""] if by_flag else []))[0] == 0
    assert not started().options.model


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["x", "--max-tokens", "4"], "stopped at --max-tokens 4"),
        (["x", "--max-tokens", "1000", "--ignore-eos"], "stopped at max_model_len 256"),
        (["x", "y", "--max-tokens", "4", "--n", "2"], "4 of 4 answers stopped at --max-tokens 4"),
        (["x", "--chat", "--max-tokens", "4"], "stopped at --max-tokens 4"),
    ],
)
def test_generate_says_last_what_cut_an_answer_short(
    capsys: Capture, arguments: list[str], last: str
) -> None:
    status, _, err = run(capsys, "generate", *arguments)
    assert status == 0
    assert err.splitlines()[-1] == last


def test_an_answer_that_ends_by_itself_is_not_called_cut(capsys: Capture) -> None:
    _, _, err = run(capsys, "generate", "x")
    assert "stopped" not in err
    assert err.splitlines()[-1].startswith("1 prompt token, 45 generated")


def test_chat_says_last_what_cut_an_answer_short(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    _, _, err = run(capsys, "chat", "--max-tokens", "3")
    assert err.splitlines()[-1] == "stopped at --max-tokens 3"


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "127.0.0.2"], False),
        ([], False),
    ],
)
def test_a_server_open_to_the_network_without_a_key_gets_one_warning(
    capsys: Capture, monkeypatch: Patch, arguments: list[str], warned: bool
) -> None:
    monkeypatch.setattr(GracefulServer, "run", lambda *_, **__: None)
    status, _, err = run(capsys, "serve", "--port", "0", *arguments)
    assert status == 0
    assert len([line for line in err.splitlines() if "without --api-key" in line]) == warned


def test_doctor_says_what_the_default_model_takes(capsys: Capture, monkeypatch: Patch, tmp_path: Any) -> None:
    home = "mlx_paged_attention.api.commands.doctor.cached_default_model"
    monkeypatch.setattr(home, lambda: None)
    assert "SmolLM2-135M-Instruct: not fetched yet (93 MB)" in run(capsys, "doctor")[1]
    (tmp_path / "model").write_bytes(b"x" * 2048)
    monkeypatch.setattr(home, lambda: tmp_path / "model")
    assert "SmolLM2-135M-Instruct: fetched, 2.0 KiB unpacked" in run(capsys, "doctor")[1]
