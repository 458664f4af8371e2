"""What the server costs per token, beside the engine: 64 streams of an engine that only emits, on time.

    python benchmarks/server_overhead.py [--streams 64] [--steps 200] [--step-ms 20] [--requests chat ...]

A thread stands in for the engine: every step it hands each stream its next token, as the real one does.
Clients are another process. Counted is the CPU time of the event loop's thread, all that happens between an
output and the socket; a busy machine disturbs that less than it would a clock. *Writing* is a chunk to the
bytes of its event, *chunks* is outputs to chunks (parser, log-probabilities, usage): the best of seven loops.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from mlx_paged_attention.api import async_llm
from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.chat import _ChatChunks
from mlx_paged_attention.api.server.completions import _CompletionChunks
from mlx_paged_attention.api.server.protocol import ChatRequest, CompletionRequest
from mlx_paged_attention.api.server.respond import DataEvents
from mlx_paged_attention.api.server.serving import Serving
from mlx_paged_attention.engine.outputs import (
    CompletionOutput,
    EngineInfo,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.chat_template import ChatTemplate
from mlx_paged_attention.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, {"prompt": "hi"}),
    "chat": (CHAT, HI),
    "chat, usage in every chunk": (CHAT, {**HI, **USAGE}),
    "chat, 5 logprobs": (CHAT, {**HI, "logprobs": True, "top_logprobs": 5}),
}
INFO = EngineInfo(
    model="emits",
    backend="none",
    dtype="none",
    forward="none",
    vocab_size=256,
    num_blocks=2,
    block_size=16,
    bytes_per_token=1,
    pool_bytes=32,
    max_model_len=1 << 20,
    max_num_seqs=1 << 10,
    max_num_batched_tokens=1 << 10,
    full_length_requests=1.0,
    eos_token_ids=[],
)


@dataclass(eq=False)
class Group:
    """A request."""

    request_id: str
    params: SamplingParams
    emit: Callable[[RequestOutput], None] | None = None


class EmittingEngine:
    """Hands every started request a token per step.

    Attributes:
        steps: tokens of an answer.
        waits_for: no step before so many requests have started.
        seconds_per_step: what the last steps really took.
    """

    info = INFO
    dead_reason = stalled_reason = None
    is_sleeping = False

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.steps = self.waits_for = 0
        self.seconds_per_step = 0.0
        self._started: list[Group] = []

    def prepare(self, request_id: str, prompt: Any, params: Any, *, kind: str, emit: Any) -> Group:
        return Group(request_id, params, emit)

    def start(self, group: Group) -> None:
        self._started.append(group)
        if len(self._started) == self.waits_for:
            threading.Thread(target=self._run, args=(self._started,), daemon=True).start()
            self._started = []

    def abort(self, group: Group) -> None:
        raise AssertionError("a client left")

    def close(self) -> None:
        pass

    def _run(self, groups: list[Group]) -> None:
        began = due = time.perf_counter()
        for step in range(self.steps):
            due += self.step_seconds
            time.sleep(max(0.0, due - time.perf_counter()))
            for group in groups:
                assert group.emit is not None
                group.emit(output(group, last=step == self.steps - 1))
        self.seconds_per_step = (time.perf_counter() - began) / self.steps


def output(group: Group, *, last: bool) -> RequestOutput:
    """One token of an answer."""
    entries = None
    if (count := group.params.logprobs) is not None:
        entries = [{101 + i: Logprob(-0.1 * (i + 1), i + 1, " the") for i in range(max(count, 1))}]
    answer = CompletionOutput(0, " the", [101], entries, None, "length" if last else None)
    metrics = RequestMetrics(0.0, 0.0, 0.0, 1.0 if last else None)
    return RequestOutput(group.request_id, None, [1, 2, 3], [answer], 0, metrics, last)


def make_tokenizer() -> Tokenizer:
    symbols = [chr(0x100 + i) for i in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return Tokenizer(backend, chat_template=template)


@contextmanager
def serving(llm: AsyncLLM) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    server = uvicorn.Server(uvicorn.Config(create_app(llm), port=0, log_level="warning"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"127.0.0.1:{port}", loop
    finally:
        server.should_exit = True
        thread.join()


async def cpu_of_loop() -> float:
    """CPU seconds that the thread of the running loop has used."""
    return time.thread_time()


async def read_streams(address: str, path: str, body: dict[str, Any], streams: int) -> None:
    """The clients: all streams to their ends."""
    host, port = address.split(":")
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"

    async def read() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        end = b""
        while data := await reader.read(1 << 16):
            end = (end + data)[-64:]
        assert b"[DONE]" in end, end
        writer.close()

    await asyncio.gather(*(read() for _ in range(streams)))


def server_cpu(name: str, engine: EmittingEngine, llm: AsyncLLM, streams: int, steps: int) -> float:
    """CPU seconds of the event loop's thread per token, requests' beginnings left out."""
    path, body = REQUESTS[name]
    spent = []
    with serving(llm) as (address, loop):

        def cpu() -> float:
            return asyncio.run_coroutine_threadsafe(cpu_of_loop(), loop).result()

        for length in (steps // 4, steps // 4, steps):  # the first one warms up
            engine.steps, engine.waits_for = length, streams
            before = cpu()
            arguments = [sys.executable, __file__, "--client", address, path, json.dumps(body), str(streams)]
            subprocess.run(arguments, check=True)
            spent.append(cpu() - before)
    return (spent[2] - spent[1]) / ((steps - steps // 4) * streams)  # of tokens alone


def chunk_and_write_cpu(name: str, llm: AsyncLLM, tokens: int) -> tuple[float, float]:
    """Seconds per token from outputs to chunks, and from chunks to bytes."""
    path, body = REQUESTS[name]

    class Ready(Serving):
        """Its outputs are there already."""

        async def _outputs(self, params: Any) -> AsyncGenerator[RequestOutput, None]:
            group = Group("r", params)
            for output_ in [output(group, last=number == tokens - 1) for number in range(tokens)]:
                yield output_

        def generate(self, prompt: Any, params: Any) -> Any:
            return self._outputs(params)

    serving_ = Ready(llm, ["emits"])
    building, writing = [], []

    async def build() -> list[Any]:
        body_ = {**body, "stream": True}
        chunks: Any = (
            _ChatChunks(serving_, ChatRequest(**body_))
            if path == CHAT
            else _CompletionChunks(serving_, CompletionRequest(**body_))
        )
        return [chunk async for several in chunks.chunks() for chunk in several]

    for _ in range(7):
        began = time.thread_time()
        chunks = asyncio.run(build())
        building.append((time.thread_time() - began) / tokens)
        began = time.thread_time()
        for chunk in chunks:
            DataEvents().event(chunk)
        writing.append((time.thread_time() - began) / tokens)
    return min(building), min(writing)


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["--client"]:
        address, path, body, streams = sys.argv[2:]
        asyncio.run(read_streams(address, path, json.loads(body), int(streams)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--requests", nargs="+", choices=list(REQUESTS), default=list(REQUESTS))
    arguments = parser.parse_args()
    engine = EmittingEngine(arguments.step_ms / 1000)
    started = SimpleNamespace(engine=engine, tokenizer=make_tokenizer(), generation_config={})
    async_llm.start_engine = lambda config, progress: started  # type: ignore[assignment, return-value]
    llm = AsyncLLM("emits")
    streams = arguments.streams
    print(f"{streams} streams, a token each every {arguments.step_ms:g} ms; µs per token\n")
    print("| request | writing | chunks | the whole server | writing, of a step | all, of a step | it took |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in arguments.requests:
        building, writing = chunk_and_write_cpu(name, llm, 2000)
        everything = server_cpu(name, engine, llm, streams, arguments.steps)
        shares = [100 * streams * each / (arguments.step_ms / 1000) for each in (writing, everything)]
        print(
            f"| {name} | {1e6 * writing:.1f} | {1e6 * building:.1f} | {1e6 * everything:.0f} "
            f"| {shares[0]:.1f} % | {shares[1]:.0f} % | {1000 * engine.seconds_per_step:.1f} ms |"
        )


if __name__ == "__main__":
    main()
