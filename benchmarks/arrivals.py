"""Time between tokens while requests keep arriving: this engine and mlx-lm's BatchGenerator, in turns.

    python benchmarks/arrivals.py [--rate 0.5] [--requests 24] [--pairs 3] [--model ...]

Requests arrive at random (Poisson) with lengths of their own, the same for both; each run waits for the last
token. A decode that waits for somebody else's prompt shows in the 99th percentile.
"""

import argparse
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_paged_attention.api.start import start_engine
from mlx_paged_attention.bench.load import Prompts
from mlx_paged_attention.bench.spread import Spread, number
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import resolve
from mlx_paged_attention.sampling.params import SamplingParams

PROMPTS, OUTPUTS = (32, 384), (16, 64)
THEIRS = "mlx-lm"
COLORS = ("#1f77b4", "#17becf", "#ff7f0e")
SMALL_STEP = 64


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, its prompt, and how many tokens it wants."""

    at: float
    prompt: list[int]
    output: int


TokenTimes = list[list[float]]
Contestant = Callable[[list[Arrival]], TokenTimes]


def arrivals(count: int, rate: float, prompts: Prompts, run: int) -> list[Arrival]:
    """The same for both contestants; another ``run`` has other ones."""
    rng = random.Random(run)
    at = 0.0
    result = []
    for i in range(count):
        at += rng.expovariate(rate)
        (prompt,) = prompts.draw(f"arrival {run} {i}", 1, rng.randint(*PROMPTS))
        result.append(Arrival(at, prompt, rng.randint(*OUTPUTS)))
    return result


class Paged:
    """This package's engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = start_engine(config, None).engine
        self.vocab_size = self._engine.info.vocab_size

    def run(self, requests: list[Arrival]) -> TokenTimes:
        arrived: SimpleQueue[tuple[int, float, Any]] = SimpleQueue()
        times: TokenTimes = [[] for _ in requests]
        begun = time.perf_counter()

        def emit_of(index: int) -> Callable[[Any], None]:
            return lambda output: arrived.put((index, time.perf_counter() - begun, output))

        for index, one in enumerate(requests):
            time.sleep(max(0.0, begun + one.at - time.perf_counter()))
            params = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True, detokenize=False)
            group = self._engine.prepare(
                f"arrival {index}", one.prompt, params, kind="delta", emit=emit_of(index)
            )
            self._engine.start(group)
        running = len(requests)
        while running:
            index, when, output = arrived.get()
            if isinstance(output, Exception):
                raise output
            times[index] += [when] * len(output.outputs[0].token_ids)
            running -= output.finished
        return times

    def close(self) -> None:
        self._engine.close()


class Padded:
    """mlx-lm's BatchGenerator with its own defaults, on the same weights."""

    def __init__(self, config: EngineConfig) -> None:
        source = resolve(config.model)
        self._model = load_model(source, dtype=config.dtype, device="cpu").model

    def run(self, requests: list[Arrival]) -> TokenTimes:
        generator = BatchGenerator(self._model, stop_tokens=[])
        times: TokenTimes = [[] for _ in requests]
        index_of: dict[int, int] = {}
        begun = time.perf_counter()
        coming, running = 0, 0
        while coming < len(requests) or running:
            while coming < len(requests) and requests[coming].at <= time.perf_counter() - begun:
                (uid,) = generator.insert([requests[coming].prompt], max_tokens=[requests[coming].output])
                index_of[uid] = coming
                coming, running = coming + 1, running + 1
            if not running:
                time.sleep(max(0.0, begun + requests[coming].at - time.perf_counter()))
                continue
            _, responses = generator.next()
            now = time.perf_counter() - begun
            for response in responses:
                times[index_of[response.uid]].append(now)
                running -= response.finish_reason is not None
        generator.close()
        return times


@dataclass(frozen=True)
class Latencies:
    """Of one run, in milliseconds."""

    itl_p50: float
    itl_p99: float
    itl_max: float
    ttft_p50: float

    @classmethod
    def of(cls, requests: list[Arrival], times: TokenTimes) -> "Latencies":
        gaps = 1e3 * np.concatenate([np.diff(own) for own in times])
        first = [1e3 * (own[0] - one.at) for one, own in zip(requests, times, strict=True)]
        p50, p99 = np.percentile(gaps, [50, 99])
        return cls(float(p50), float(p99), float(gaps.max()), float(np.median(first)))


FIELDS = {
    "itl_p50": "ITL p50, ms",
    "itl_p99": "ITL p99, ms",
    "itl_max": "longest gap, ms",
    "ttft_p50": "TTFT p50, ms",
}


def compare(model: str | None, *, rate: float, requests: int, pairs: int) -> dict[str, Any]:
    """All in turns; each run's numbers, and all gaps between tokens for a plot."""
    config = EngineConfig(model=model, skip_tokenizer_init=True, device="cpu")
    small = replace(config, max_num_batched_tokens=SMALL_STEP)
    with closing(Paged(config)) as paged, closing(Paged(small)) as in_small_steps:
        contestants: dict[str, Contestant] = {
            "ours": paged.run,
            f"ours, {SMALL_STEP} tokens a step": in_small_steps.run,
            THEIRS: Padded(config).run,
        }
        runs: dict[str, list[Latencies]] = {name: [] for name in contestants}
        gaps: dict[str, list[float]] = {name: [] for name in contestants}
        prompts = Prompts(0, paged.vocab_size)
        for contestant in contestants.values():
            contestant(arrivals(2, 100.0, prompts, -1))  # warm up
        for pair in range(pairs):
            load = arrivals(requests, rate, prompts, pair)
            order = list(contestants.items())
            for name, contestant in order if pair % 2 == 0 else reversed(order):
                times = contestant(load)
                runs[name].append(Latencies.of(load, times))
                gaps[name] += [1e3 * float(gap) for own in times for gap in np.diff(own)]
    return {
        "rate": rate,
        "requests": requests,
        "pairs": pairs,
        "runs": {name: [vars(one) for one in latencies] for name, latencies in runs.items()},
        "gaps_ms": {name: sorted(round(gap, 1) for gap in all_gaps) for name, all_gaps in gaps.items()},
    }


def table(result: dict[str, Any]) -> list[str]:
    """Medians of the runs, and of the ratios of each pair."""
    names = list(result["runs"])
    ours = [name for name in names if name != THEIRS]
    lines = [
        "| " + " | ".join(["", *names, *(f"{THEIRS} / {name}" for name in ours)]) + " |",
        "| --- |" + " ---: |" * (len(names) + len(ours)),
    ]
    for field, title in FIELDS.items():
        values = {name: [run[field] for run in result["runs"][name]] for name in names}
        ratios = [[b / a for a, b in zip(values[name], values[THEIRS], strict=True)] for name in ours]
        cells = [str(Spread.of(one)) for one in (*values.values(), *ratios)]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """The share of gaps that are longer than so many milliseconds."""
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    panel = figure.subplots()
    for color, (name, gaps) in zip(COLORS, result["gaps_ms"].items(), strict=True):
        panel.step(gaps, 1 - np.arange(len(gaps)) / len(gaps), where="post", color=color, label=name)
        p99 = number(float(np.percentile(gaps, 99)))
        panel.plot([], [], " ", label=f"  p99 {p99} ms")
    panel.axhline(0.01, color="gray", linewidth=0.8, linestyle=":")
    panel.set(
        xscale="log",
        yscale="log",
        ylim=(5e-4, 1.1),
        xlabel="time between two tokens of an answer, ms",
        ylabel="share of gaps that are longer",
        title=f"{result['requests']} requests, {result['rate']} a second, {result['pairs']} runs each",
    )
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or repo id; default SmolLM2-135M-Instruct")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    result = compare(arguments.model, rate=arguments.rate, requests=arguments.requests, pairs=arguments.pairs)
    print("\n".join(table(result)))
    if arguments.plot is not None:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
