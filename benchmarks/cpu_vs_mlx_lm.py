"""The CPU numbers of the documentation: this package against mlx-lm, and what prefix caching costs.

    python benchmarks/cpu_vs_mlx_lm.py --output-dir results
    python benchmarks/cpu_vs_mlx_lm.py --quick

SmolLM2-135M-Instruct unless --model says otherwise. Writes ``report.json``, ``report.md`` and plots.
"""

import argparse
import dataclasses
import json
from contextlib import ExitStack, closing
from pathlib import Path

from mlx_paged_attention.bench import workloads
from mlx_paged_attention.bench.comparison import Comparison
from mlx_paged_attention.bench.load import Prompts
from mlx_paged_attention.bench.paged import PagedEngine
from mlx_paged_attention.bench.plot import require_matplotlib, write_plots
from mlx_paged_attention.bench.report import Report
from mlx_paged_attention.bench.session import check_fits, run_bench, run_trials
from mlx_paged_attention.bench.settings import FULL, QUICK, BenchSettings
from mlx_paged_attention.bench.spread import Spread
from mlx_paged_attention.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="GGUF file, directory or repo id; default SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="short lengths: to see that it works")
    parser.add_argument("--pairs", type=int, help="runs of each contestant (full: 7, quick: 3)")
    parser.add_argument("--llama-cpp", type=Path, help="path of llama-batched-bench")
    parser.add_argument("--output-dir", type=Path, default=Path("cpu_vs_mlx_lm"))
    arguments = parser.parse_args()
    require_matplotlib()

    settings = QUICK if arguments.quick else FULL
    if arguments.pairs is not None:
        settings = dataclasses.replace(settings, pairs=arguments.pairs)
    config = EngineConfig(model=arguments.model, skip_tokenizer_init=True, device="cpu")
    report = run_bench(config, settings, llama_cpp=arguments.llama_cpp, progress=print)
    write(report, arguments.output_dir)  # the rest takes a while, and may be cut short
    cost = prefix_caching_cost(config, settings)
    report = dataclasses.replace(report, comparisons=[*report.comparisons, *cost])
    print(write(report, arguments.output_dir))


def write(report: Report, directory: Path) -> str:
    """Report and plots into a directory; returns the text."""
    directory.mkdir(parents=True, exist_ok=True)
    text = report.as_text() + "\n\n" + "\n".join(claims(report)) + "\n"
    (directory / "report.md").write_text(text)
    (directory / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    write_plots(report, directory)
    return text


def prefix_caching_cost(config: EngineConfig, settings: BenchSettings) -> list[Comparison]:
    """Prompts that never hit, with prefix caching on and off, at the most requests at once."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                closing(PagedEngine(name, dataclasses.replace(config, enable_prefix_caching=on)))
            )
            for name, on in (("prefix caching on", True), ("prefix caching off", False))
        ]
        check_fits(settings, engines[0].info)
        prompts = Prompts(settings.seed, engines[0].info.vocab_size)
        trial = workloads.decode(engines, settings, prompts, max(settings.concurrency))
        trial = dataclasses.replace(trial, workload="prefix caching, no hits")
        return run_trials([trial])


def claims(report: Report) -> list[str]:
    """What the documentation says of these numbers, each with its spread."""
    lines = ["| claim | measured: median (lowest to highest) | |", "| --- | --- | --- |"]

    def claim(text: str, spread: Spread, holds: bool) -> None:
        lines.append(f"| {text} | {spread} | {'holds' if holds else '**does not hold**'} |")

    for one in report.comparisons:
        if one.workload == "decode":
            least = 1.0 if one.setting["concurrency"] == 1 else 1.2
            name = f"decode steps at {one.setting['concurrency']}: at least {least} times mlx-lm's speed"
            if "decode_step_ms" in one.metrics:
                speed = one.ratio_spread("mlx-lm", "decode_step_ms")
                claim(name, speed, speed.median >= least)
            end_to_end = one.ratio_spread("mlx-lm", "output_tokens_per_s")
            claim(name.replace("decode steps", "prefill and decode"), end_to_end, end_to_end.median >= least)
        elif one.workload == "shared-prefix" and one.ratio == "speed-up":
            speed = one.ratio_spread("mlx-lm", "elapsed_s")
            claim("shared prefix, end to end: at least 4 times mlx-lm's speed", speed, speed.median >= 4)
        elif one.workload == "shared-prefix":
            cost = one.ratio_spread("suffix alone", "ttft_ms")
            claim("first token of a warm prefix: at most 1.1 times a suffix alone", cost, cost.median <= 1.1)
        elif one.workload.startswith("prefix caching"):
            kept = one.ratio_spread("prefix caching off", "output_tokens_per_s")
            claim("prefix caching without hits keeps 99 % of the throughput", kept, kept.median >= 0.99)
    return lines


if __name__ == "__main__":
    main()
