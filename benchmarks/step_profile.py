"""Where the time of one decode step goes on a CPU, as a table.

    python benchmarks/step_profile.py --rows 1 8 32 --context 512

The package is not instrumented: its functions are wrapped from outside, and time is charged to
the innermost wrapped function that runs. MLX is lazy, so what its operations take is spent where
they are evaluated: between attentions by the layer that needs its inputs or, at one row, beside the
statement of the next layers; and what is then left by an evaluation that this script adds ahead of
sampling.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_paged_attention.bench.load import Prompts
from mlx_paged_attention.bench.machine import machine_facts
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.engine import Engine
from mlx_paged_attention.engine.live_requests import LiveRequests
from mlx_paged_attention.engine.loading import load_engine
from mlx_paged_attention.models.source import resolve
from mlx_paged_attention.runner import model_runner
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.scheduler.scheduler import Scheduler

import mlx.core as mx  # isort: skip
from mlx_paged_attention.ops import host  # isort: skip

SCHEDULING = "scheduling (ours)"
BATCH = "batch building (ours)"
GRAPH = "graph building of the model (Python and MLX)"
EVALUATION = "evaluation of MLX operations up to the last attention"
HEAD = "evaluation of what is left of the last layers, and the head"
KERNEL = "attention kernel (ours)"
HAND_OVER = "handing arrays to the kernel and back (ours)"
WRITE = "KV write (ours)"
SAMPLING = "sampling (ours)"
OUTPUT = "output processing (ours)"
REST = "the rest of the runner and the engine (ours)"
PARTS = (SCHEDULING, BATCH, GRAPH, EVALUATION, HEAD, KERNEL, HAND_OVER, WRITE, SAMPLING, OUTPUT, REST)

# Owner, name and part of everything that is timed.
WRAPPED: tuple[tuple[Any, str, str], ...] = (
    (Engine, "step", REST),
    (Scheduler, "schedule", SCHEDULING),
    (Scheduler, "update", OUTPUT),
    (Engine, "_advance", OUTPUT),
    (LiveRequests, "report", OUTPUT),
    (model_runner.ModelRunner, "_admit", BATCH),
    (model_runner.ModelRunner, "_wanted", BATCH),
    (ModelHost, "forward", GRAPH),
    (model_runner, "launch", SAMPLING),
    (host.HostLayer, "write", WRITE),
    (host.HostLayer, "flush", WRITE),
    (host.HostLayer, "attend_in_place", HAND_OVER),
    (host, "attend_rows", KERNEL),
    (mx, "eval", EVALUATION),
    (mx, "async_eval", EVALUATION),  # waits while many operations are queued
)


class Profiler:
    """Exclusive times: a wrapped function's own, without the wrapped ones that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        self._switch()
        self._stack.append(part)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.charge(part):
                return function(*arguments, **options)

        return timed


@contextmanager
def installed(profiler: Profiler) -> Iterator[None]:
    """Wrap everything; a name that no longer exists raises AttributeError."""
    evaluate = mx.eval
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in WRAPPED]
    originals.append((model_runner, "build_batches", model_runner.build_batches))
    try:
        for owner, name, part in WRAPPED:
            setattr(owner, name, profiler.wrap(getattr(owner, name), part))
        build_batches, launch = model_runner.build_batches, model_runner.launch

        def timed_batches(*arguments: Any, **options: Any) -> Iterator[Any]:
            batches = build_batches(*arguments, **options)
            while True:
                with profiler.charge(BATCH):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        def launch_evaluated(logits: mx.array, *arguments: Any) -> Any:
            with profiler.charge(HEAD):
                evaluate(logits)
            pending = launch(logits, *arguments)
            pending.read = profiler.wrap(pending.read, SAMPLING)
            return pending

        model_runner.build_batches = timed_batches  # type: ignore[assignment]
        model_runner.launch = launch_evaluated  # type: ignore[assignment]
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def profile(engine: Engine, rows: int, context: int, steps: int) -> list[Counter[str]]:
    """Own times of each part in each of ``steps`` decode steps of ``rows`` rows."""
    prompts = Prompts(0, engine.info.vocab_size).draw(f"profile {rows}", rows, context - steps // 2)
    params = SamplingParams(temperature=0, max_tokens=steps + 3, ignore_eos=True)
    firsts: set[str] = set()
    failures: list[Exception] = []

    def emit(output: Any) -> None:
        if isinstance(output, Exception):
            failures.append(output)
        else:
            firsts.add(output.request_id)

    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(f"profile-{i}", prompt, params, kind="delta", emit=emit))
    engine.step()  # every prompt whole
    engine.step()  # a decode step to warm up
    if len(firsts) < rows:
        raise failures[0] if failures else RuntimeError("the prompts were not computed in one step")
    profiler = Profiler()
    samples = []
    with installed(profiler):
        for _ in range(steps):
            profiler.seconds.clear()
            engine.step()
            if failures:
                raise failures[0]
            samples.append(Counter(profiler.seconds))
    if failures:
        raise failures[0]
    for i in range(rows):
        engine.abort(f"profile-{i}")
    return samples


def table(samples: dict[int, list[Counter[str]]], context: int) -> str:
    """Markdown: the median of each part in milliseconds and its share of the step's median."""
    heads = [f"{rows} row{'' if rows == 1 else 's'}, ms | share" for rows in samples]
    lines = [
        f"| one decode step, context {context} | {' | '.join(heads)} |",
        "| --- |" + " ---: | ---: |" * len(samples),
    ]
    for part in PARTS:
        cells = []
        for steps in samples.values():
            total = statistics.median(step.total() for step in steps)
            median = statistics.median(step[part] for step in steps)
            cells.append(f"{median * 1e3:.2f} | {median / total:.1%}")
        lines.append(f"| {part} | {' | '.join(cells)} |")
    cells = []
    for steps in samples.values():
        totals = [step.total() * 1e3 for step in steps]
        spread = f"{statistics.median(totals):.1f} ({min(totals):.1f} to {max(totals):.1f})"
        cells.append(f"{spread} | 100%")
    lines.append(f"| whole step, median (lowest to highest) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="GGUF file, directory or repo id; default SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="tokens, in the middle of the steps")
    parser.add_argument("--steps", type=int, default=20, help="steps measured")
    arguments = parser.parse_args()

    facts = machine_facts()
    most = max(arguments.rows)
    config = EngineConfig(
        model=arguments.model,
        skip_tokenizer_init=True,
        device="cpu",
        max_num_seqs=most,
        # One step computes all prompts, so that all rows have the same context.
        max_num_batched_tokens=most * arguments.context,
    )
    loaded = load_engine(config, resolve(config.model), print)
    engine = Engine(config, loaded.info, loaded.runner, loaded.fingerprint, None)
    samples = {rows: profile(engine, rows, arguments.context, arguments.steps) for rows in arguments.rows}
    facts |= {"model": loaded.info.model, "dtype": loaded.info.dtype, "steps measured": arguments.steps}
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()), end="\n\n")
    print(table(samples, arguments.context))


if __name__ == "__main__":
    main()
