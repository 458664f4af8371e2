"""``mlx-paged top`` and ``GET /debug/blocks``: what a person sees of a server's memory."""

import http.server
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import httpx
import pytest
from cli_run import run
from fake_llm import FakeLLM
from test_http_socket import Serve

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.blocks_report import blocks_report
from mlx_paged_attention.cache.block_map import BlockRun
from mlx_paged_attention.engine.blocks_view import BlocksView, RequestView
from mlx_paged_attention.engine.outputs import EngineStats

Capture = pytest.CaptureFixture[str]

STATS = EngineStats(
    num_blocks=101,
    block_size=16,
    free_blocks=70,
    cached_blocks=20,
    used_blocks=30,
    running=2,
    waiting=1,
    preemptions=3,
    prefix_queries=640,
    prefix_hits=320,
    pool_bytes=1 << 30,
    steps=1234,
    pool_budget_bytes=3 << 30,
)
VIEW = BlocksView(
    model="org/model",
    stats=STATS,
    shared_blocks=10,
    saved_blocks=10,
    empty_slots=12,
    waste=0.025,
    hit_rate=0.5,
    recent_hit_rate=0.25,
    copies=2,
    requests=(
        RequestView("first", "running", 12.34, 200, 40, 239, 160, 15, 1, 0),
        RequestView("0123456789abcdef0123456789abcdef#1", "running", 2.0, 200, 3, 202, 160, 15, 11, 1),
        RequestView("third", "waiting", 0.5, 1000, 0, 0, 0, 0, 0, 0),
    ),
    requests_left_out=4,
    runs=(
        BlockRun(0, 1, "null"),
        BlockRun(1, 10, "shared", ("first", "0123456789abcdef0123456789abcdef#1"), 2),
        BlockRun(11, 5, "used", ("first",), 1),
        BlockRun(16, 5, "used", ("0123456789abcdef0123456789abcdef#1",), 1),
        BlockRun(21, 20, "cached"),
        BlockRun(41, 60, "free"),
    ),
    blocks_left_out=0,
)


def test_a_wide_terminal_shows_counts_a_map_and_every_column() -> None:
    lines = blocks_report(VIEW, 120)
    assert lines[:7] == [
        "org/model",
        "memory    30.0% of 100 blocks of 16 tokens used; 1.0 GiB of 3.0 GiB taken",
        "blocks    30 used, 20 cached, 50 free",
        "sharing   10 blocks shared, which saves 10; 2 copied on write",
        "waste     2.5%: 12 slots of used blocks empty",
        "prefixes  50.0% of looked-up tokens hit, 25.0% of late",
        "requests  2 running, 1 waiting; 3 preemptions in 1,234 steps",
    ]
    assert "0" + 10 * "=" + 5 * "a" + 5 * "b" + 20 * "+" + 60 * "." in lines
    head, first, second, third, more = lines[-5:]
    titles = "request status blocks prompt output cached empty age s preempted computed"
    assert head.split() == titles.split()
    assert first.split() == ["a", "first", "running", "15", "200", "40", "160", "1", "12.3", "0", "239"]
    assert second.split()[:2] == ["b", "0123456789abcdef0123456789abcdef#1"]
    assert third.split()[:3] == ["c", "third", "waiting"]
    assert more == "  and 4 more"


@pytest.mark.parametrize("width", [1, 10, 30, 40, 60, 79, 80, 200])
@pytest.mark.parametrize("height", [None, 5, 15, 24])
def test_no_line_is_wider_than_the_terminal_and_no_page_higher(width: int, height: int | None) -> None:
    lines = blocks_report(VIEW, width, height)
    assert max(map(len, lines)) <= width
    assert height is None or len(lines) <= height


def test_a_narrow_terminal_keeps_who_and_how_many_blocks() -> None:
    lines = blocks_report(VIEW, 40)
    head, _, second = lines[-5:-2]
    assert head.split() == ["request", "status", "blocks"]
    assert second.split() == ["b", "0123456789abcd..ef#1", "running", "15"]


def test_a_low_terminal_tells_how_many_requests_it_leaves_out() -> None:
    assert blocks_report(VIEW, 120, 14)[-1] == "  and 6 more"


def test_a_large_pool_takes_few_lines_of_signs_for_many_blocks() -> None:
    runs = (BlockRun(0, 1, "null"), BlockRun(1, 30_000, "cached"), BlockRun(30_001, 69_999, "free"))
    lines = blocks_report(replace(VIEW, runs=runs, blocks_left_out=5), 50)
    start = next(i for i, line in enumerate(lines) if line.startswith("map"))
    rows = lines[start + 1 : lines.index("", start)]
    assert len(rows) <= 8
    signs = "".join(rows)
    assert set(signs) == {"+", "."}
    assert signs.count("+") / len(signs) == pytest.approx(0.3, abs=0.01)
    assert "5 more blocks not shown" in blocks_report(replace(VIEW, blocks_left_out=5), 120)[8]


def test_the_map_explains_the_blocks_of_requests_that_have_no_letter() -> None:
    assert "#" not in "".join(blocks_report(VIEW, 120)[8:10])
    runs = (BlockRun(0, 1, "null"), BlockRun(1, 3, "used", ("the 60th",), 1))
    legend, signs = blocks_report(replace(VIEW, runs=runs), 120)[8:10]
    assert signs == "0###"
    assert legend.endswith(", # another's")


def test_ids_that_clients_chose_cannot_command_the_terminal() -> None:
    evil = replace(VIEW.requests[0], request_id="\x1b[2Jx\n")
    lines = blocks_report(replace(VIEW, requests=(evil,), model="m\x1b]0;"), 120)
    assert all(line.isprintable() for line in lines)


def test_once_prints_one_snapshot_of_a_server(capsys: Capture, serve: Serve) -> None:
    with serve(FakeLLM()) as url:
        for address in (url, f"{url}/v1", f"{url}/", url.removeprefix("http://")):
            status, out, err = run(capsys, "top", address, "--once")
            assert (status, err) == (0, "")
            memory = "0.0% of 100 blocks of 16 tokens used; 808.0 KiB of 1.6 MiB taken"
            assert out.startswith(f"fake/bytes\nmemory    {memory}\n")
            assert out.endswith("no requests\n")


def test_without_a_terminal_it_looks_once(capsys: Capture, serve: Serve) -> None:
    with serve(FakeLLM()) as url:
        status, out, _ = run(capsys, "top", url)
    assert status == 0
    assert out.count("memory") == 1


def test_a_server_with_a_key_wants_it(capsys: Capture, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(FakeLLM(), api_keys=["secret"]) as url:
        status, out, err = run(capsys, "top", url)
        assert (status, out) == (2, "")
        assert "--api-key" in err
        assert run(capsys, "top", url, "--api-key", "secret")[0] == 0
        monkeypatch.setenv("MLX_PAGED_API_KEY", "secret")
        assert run(capsys, "top", url)[0] == 0


def test_a_dead_engine_is_told_with_its_reason(capsys: Capture, serve: Serve) -> None:
    llm = FakeLLM()
    llm.dead_reason = "scripted failure"
    with serve(llm) as url:
        status, _, err = run(capsys, "top", url)
    assert status == 2
    assert "scripted failure" in err


def test_no_server_is_one_line_that_says_what_to_do(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status, out, err = run(capsys, "top", f"127.0.0.1:{port}")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert f"no server answers at http://127.0.0.1:{port}" in err
    assert "mlx-paged serve" in err


@contextmanager
def other_server(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"{}"),
        (200, b"<html>"),
        (200, b'{"blocks": 3}'),
        (200, b"\xff"),
        (500, b""),
        (503, b"busy"),
        (503, b"[]"),
        (503, b'{"error": "x"}'),
    ],
)
def test_another_server_is_told_apart(capsys: Capture, status: int, body: bytes) -> None:
    with other_server(status, body) as url:
        ended, out, err = run(capsys, "top", url, "--once")
    assert (ended, out) == (2, "")
    assert err.count("\n") == 1
    assert f"what answers at {url} is not mlx-paged serve" in err


def test_what_speaks_no_http_is_told_apart(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        status, _, err = run(capsys, "top", f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert status == 2
    assert "is not mlx-paged serve" in err


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "ftp://host/"])
def test_what_is_no_address_is_refused(capsys: Capture, url: str) -> None:
    status, _, err = run(capsys, "top", url)
    assert status == 2
    assert "is no address of a server" in err


def test_an_interval_of_nothing_is_refused(capsys: Capture) -> None:
    for interval in ("0", "-1", "nan"):
        status, _, err = run(capsys, "top", "--interval", interval)
        assert status == 2
        assert "--interval" in err


def test_a_terminal_is_repainted_until_it_is_interrupted(serve: Serve) -> None:
    with serve(FakeLLM()) as url:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_paged_attention", "top", url, "--interval", "0.05"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 30
        while seen.count(b"\x1b[H") < 3:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(2)
        status = process.wait(10)
        while select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:
                break
        os.close(ours)
    assert status == 130
    text = seen.decode()
    assert text.startswith("\x1b[?1049h")
    assert text.rstrip().endswith("\x1b[?1049l"), "the terminal is as it was"
    assert text.count("fake/bytes") >= 3


def test_the_real_engine_tells_its_blocks_over_http(serve: Serve, tiny_model, capsys: Capture) -> None:
    prompt = [(7 * i + i * i) % 250 + 3 for i in range(40)]
    body = {"prompt": prompt, "max_tokens": 4000, "temperature": 0, "stream": True}
    with (
        closing(AsyncLLM(str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=600)) as llm,
        serve(llm) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()  # forgotten, it would end the request
        next(lines)
        told = httpx.get(f"{url}/debug/blocks").json()
        (request,) = told["requests"]
        assert request["prompt_tokens"] == 40
        used = sum(run["count"] for run in told["runs"] if run["state"] == "used")
        assert used == request["blocks"] == told["stats"]["used_blocks"] >= 3
        assert [run["owners"] for run in told["runs"] if run["state"] == "used"] == [[request["request_id"]]]
        assert not set(map(str, prompt)) <= set(re.findall(r"\d+", json.dumps(told)))
        status, out, _ = run(capsys, "top", url, "--once")
        assert status == 0
        assert "1 running" in out
        assert request["request_id"] in out or request["request_id"][:20] in out
