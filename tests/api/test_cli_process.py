"""The command line as a program: terminals, signals, pipes; on a scripted engine."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import httpx
import pytest
from fake_llm import ANSWER

FIRST = "0" + ANSWER[1:]
FAKE_CLI = [sys.executable, str(Path(__file__).with_name("cli_on_fake.py"))]


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._end, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [*FAKE_CLI, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: os.set_inheritable(0, True),
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(terminal)
        self.seen = ""

    def write(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> None:
        assert self.shows(text, 20), self.seen
        self.seen = self.seen.split(text, 1)[1]

    def shows(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.seen and (left := deadline - time.monotonic()) > 0:
            if not select.select([self._end], [], [], left)[0]:
                break
            try:
                self.seen += os.read(self._end, 1000).decode()
            except OSError:  # the program has left
                break
        return text in self.seen

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    terminal = Terminal("0.1", "chat")
    terminal.wait_for("> ")
    terminal.write("hi\n")
    terminal.wait_for("0he")
    terminal.interrupt()
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    terminal.write("and?\n")
    terminal.wait_for("0he")
    terminal.interrupt()
    terminal.wait_for("> ")
    terminal.write("\x04")
    # What had been said when it was stopped is part of the conversation.
    terminal.wait_for("closed; 2 aborted; last prompt '<user>hi<assistant>0he")
    terminal.wait_for("<user>and?<assistant>'")
    assert terminal.process.wait(10) == 0


def test_ctrl_c_at_the_prompt_leaves_with_130() -> None:
    terminal = Terminal("0", "chat")
    terminal.wait_for("> ")
    terminal.interrupt()
    if not terminal.shows("closed", 2):
        # Between the prompt and the read, input() keeps a signal until the next key: press again.
        terminal.interrupt()
    terminal.wait_for("closed; 0 aborted")
    assert terminal.process.wait(10) == 130


def test_exit_leaves() -> None:
    terminal = Terminal("0", "chat")
    terminal.wait_for("> ")
    terminal.write("/exit\n")
    assert terminal.process.wait(10) == 0


def test_ctrl_c_ends_generate_with_130() -> None:
    process = subprocess.Popen(
        [*FAKE_CLI, "0.1", "generate", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == "0he"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "closed; 1 aborted" in err
    assert "Traceback" not in err


BUSY_CLI = """
import threading
from mlx_paged_attention.api import cli
from mlx_paged_attention.engine.mlx_thread import run_on_mlx_thread

inside = threading.Event()

def load():
    import mlx.core as mx
    while True:
        inside.set()
        mx.eval(mx.random.normal((500, 500)) @ mx.random.normal((500, 500)))

run_on_mlx_thread(load)
inside.wait()
cli.run = lambda arguments: print("said") or int(arguments[0])
cli.main()
"""


@pytest.mark.parametrize("status", ["0", "130"])
def test_leaving_while_a_model_is_loaded_does_not_abort_the_process(status: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BUSY_CLI, status], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (int(status), "said\n", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [*FAKE_CLI, "0.02", "generate", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == "0he"
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(10) == 141
    assert "closed; 1 aborted" in err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def serve(step_time: str, names: str, *arguments: str) -> tuple[subprocess.Popen[str], IO[str], str]:
    """A server that has started: its process, what it writes to stderr, and its address."""
    process = subprocess.Popen(
        [*FAKE_CLI, step_time, "serve", "--port", "0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = process.stderr
    assert errors is not None
    url = line = ""
    while "startup complete" not in line:
        line = errors.readline()
        assert line, "the server ended"
        if f"serving {names} at " in line:
            url = line.split(" at ")[1].split()[0]
    assert url
    return process, errors, url


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve_answers_until_it_is_told_to_stop(number: int, status: int) -> None:
    process, errors, url = serve("0", "a, b", "--served-model-name", "a", "b", "--api-key", "k")
    answer = httpx.post(
        f"{url}/completions", json={"prompt": "x", "model": "b"}, headers={"Authorization": "Bearer k"}
    )
    assert answer.json()["choices"][0]["text"] == FIRST[:16]
    process.send_signal(number)
    err = errors.read()
    assert process.wait(10) == status
    assert "closed; 0 aborted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("signals", "status"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGTERM], 143)],
)
def test_serve_told_to_stop_ends_a_stream_and_says_so_in_one_line(
    signals: list[signal.Signals], status: int
) -> None:
    process, errors, url = serve("0.05", "fake/bytes")
    body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
    lines = []
    cut = False
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=20) as answer:
        received = answer.iter_lines()
        lines.append(next(received))
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        try:
            lines += [line for line in received if line]
        except httpx.RemoteProtocolError:
            cut = True
    err = errors.read()
    assert process.wait(10) == status
    assert "Traceback" not in err
    assert "ERROR" not in err
    assert cut == (len(signals) == 2)
    if cut:
        assert err.count("1 connection cut off") == 1
    else:
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert err.count("1 request still running") == 1
