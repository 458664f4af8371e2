"""``mlx-paged bench``: how fast this is here, beside mlx-lm and llama.cpp."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from mlx_paged_attention.api.commands.flags import DEFAULT_ENGINE, EngineFlags, say
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError

_MEASURED = Group.create_ordered(
    "What is measured", help="What is not given is the quick run's, or with --full the full run's."
)
_OUTPUT = Group.create_ordered("Output")

EXAMPLES = """Examples:

    mlx-paged bench
    mlx-paged bench --full --output-json report.json --plot plots
    mlx-paged bench --workload decode --concurrency 1 4 16 --input-len 256 --output-len 64
    mlx-paged bench --model my.gguf --llama-cpp ~/llama.cpp/build/bin/llama-batched-bench
"""


def _measured(text: str, **options: Any) -> Parameter:
    return Parameter(help=text, group=_MEASURED, **options)


def bench(
    *,
    full: Annotated[
        bool,
        _measured(
            "Context 512, concurrency 1, 8 and 32, a prefix of 1,000 tokens, 7 pairs: about an hour for "
            "the default model on two cores. Without it: under two minutes.",
            negative="",
            show_default=False,
        ),
    ] = False,
    workload: Annotated[
        list[Literal["decode", "shared-prefix", "latency"]] | None,
        _measured("One or several of decode, shared-prefix, latency.", consume_multiple=True, negative=""),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        _measured(
            "decode: how many requests at once; may be several numbers.", consume_multiple=True, negative=""
        ),
    ] = None,
    input_len: Annotated[int | None, _measured("decode, latency: tokens of a prompt.")] = None,
    output_len: Annotated[int | None, _measured("decode, latency: tokens of an answer.")] = None,
    prefix_len: Annotated[int | None, _measured("shared-prefix: tokens that all prompts begin with.")] = None,
    suffix_len: Annotated[int | None, _measured("shared-prefix: tokens of each prompt's own.")] = None,
    prefix_requests: Annotated[int | None, _measured("shared-prefix: how many requests at once.")] = None,
    prefix_output_len: Annotated[int | None, _measured("shared-prefix: tokens of an answer.")] = None,
    pairs: Annotated[int | None, _measured("How often each contestant is measured, in turns.")] = None,
    mlx_lm: Annotated[
        bool, _measured("Compare with mlx-lm's BatchGenerator, which loads the weights a second time.")
    ] = True,
    llama_cpp: Annotated[
        Path | None,
        _measured("Compare with llama.cpp: path of its llama-batched-bench (or llama-bench)."),
    ] = None,
    output_json: Annotated[
        Path | None, Parameter(help="Also write JSON to this file.", group=_OUTPUT)
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="Also write plots (PNG) to this directory.", group=_OUTPUT)
    ] = None,
    engine: EngineFlags = DEFAULT_ENGINE,
) -> None:
    """Measure speed on random prompts, in turns with mlx-lm on the same weights; a table goes to stdout."""
    given: dict[str, Any] = {
        "workloads": workload and tuple(workload),
        "concurrency": concurrency and tuple(concurrency),
        "input_len": input_len,
        "output_len": output_len,
        "prefix_len": prefix_len,
        "suffix_len": suffix_len,
        "prefix_requests": prefix_requests,
        "prefix_output_len": prefix_output_len,
        "pairs": pairs,
        "seed": engine.seed,
    }
    config = EngineConfig(**(engine.options() | {"skip_tokenizer_init": True}))
    # Imported here: other commands start without numpy and what else this needs.
    from mlx_paged_attention.bench import plot as plots
    from mlx_paged_attention.bench.session import run_bench
    from mlx_paged_attention.bench.settings import FULL, QUICK

    settings = replace(
        FULL if full else QUICK, **{name: value for name, value in given.items() if value is not None}
    )
    if output_json is not None:
        _require_writable(output_json)
    if plot is not None:
        plots.require_matplotlib()
        plot.mkdir(parents=True, exist_ok=True)
    report = run_bench(config, settings, mlx_lm=mlx_lm, llama_cpp=llama_cpp, progress=say)
    print(report.as_text(), flush=True)
    if output_json is not None:
        output_json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        say(f"wrote {output_json}")
    if plot is not None:
        for path in plots.write_plots(report, plot):
            say(f"wrote {path}")
    more = "" if full else "; for numbers worth quoting: mlx-paged bench --full"
    say(f"took {report.seconds:.0f} s{more}")


def _require_writable(path: Path) -> None:
    """Now, not after an hour of measuring."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InvalidRequestError(f"{path} cannot be written", "output_json")
