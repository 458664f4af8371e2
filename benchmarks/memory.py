"""What the paged KV cache does for memory: a number, a plot and a table for every claim of docs/memory.md.

    python benchmarks/memory.py --all
    python benchmarks/memory.py --parts waste,held --quick --output-dir results

* waste: slots that requests hold and have not filled, by block size, on lengths like ShareGPT's; in the
  scheduler alone, and at 16 as ``LLM.blocks()`` sees it in the engine.
* held: requests that run at once in a fixed memory: this scheduler, memory reserved per request, and mlx-lm's
  BatchGenerator, whose arrays are asked for their size.
* sharing: blocks saved by several answers (n) to one prompt, and by the beams of a search.
* ttft: time to the first token behind a prefix of 2,000 tokens, cold and warm.
* context: the longest prompt and answer in a GiB for 1, 4 and 16 users, here and with mlx-lm; three of these
  points really run.
* arrivals: time between tokens while requests keep arriving, here and with mlx-lm (arrivals.py).

Prints tables, and writes ``memory.json`` and ``memory-*.png``. Counts of blocks depend on no machine; times
want a quiet one. All parts take under ten minutes on two cores.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # its other files, from wherever it is run

import arrivals
import memory_held as held
import memory_shared as shared
import mlx.core as mx

from mlx_paged_attention.bench.machine import machine_facts
from mlx_paged_attention.bench.plot import require_matplotlib
from mlx_paged_attention.bench.spread import Spread

Result = dict[str, Any]

SLOTS = 32_768
BLOCK_SIZES = (8, 16, 32, 64)
ANSWERS = (2, 4, 6)
USERS = (1, 4, 16)
PREFIX, SUFFIX = 2000, 64
# Points that are really run: one for each number of users, one of each kind.
POINTS: tuple[tuple[shared.Scenario, int], ...] = (("equal", 1), ("one long", 4), ("one document", 16))


def waste(quick: bool) -> Result:
    lengths = held.sharegpt_lengths(100 if quick else 600, 0)
    with tempfile.TemporaryDirectory() as directory:
        model = shared.write_llama(Path(directory) / "small", layers=1, kv_heads=1, head_dim=16)
        engine = shared.sharing(model, lengths[: 4 if quick else 64], 1)
    by_size = {size: held.paged(lengths, size, SLOTS // 4 if quick else SLOTS).waste for size in BLOCK_SIZES}
    return {"waste": by_size, "engine_waste_at_16": engine.waste, "requests": len(lengths)}


def waste_table(result: Result) -> list[str]:
    rows = [f"| {size} | {share:.1%} |" for size, share in result["waste"].items()]
    return [
        "| block size | slots wasted |",
        "| ---: | ---: |",
        *rows,
        f"| 16, in the engine | {result['engine_waste_at_16']:.1%} |",
    ]


def held_at_once(quick: bool) -> Result:
    slots = SLOTS // 4 if quick else SLOTS
    lengths = held.sharegpt_lengths(200 if quick else 2000, 0)
    # Fewer for mlx-lm's arrays, which take their time; on more, its batch could only be smaller.
    batch, padded = held.largest_padded(lengths[: 30 if quick else 300], slots)
    ways = {
        "reserved for the longest": held.reserved(lengths, slots, exact=False),
        f"mlx-lm, batch of {batch}": padded,
        "reserved for the very length": held.reserved(lengths, slots, exact=True),
        "paged, blocks of 16": held.paged(lengths, 16, slots),
    }
    told = {name: asdict(one) for name, one in ways.items()}
    return {"slots": slots, "requests": len(lengths), "ways": told}


def held_table(result: Result) -> list[str]:
    return [
        "| memory | requests at once | useful |",
        "| --- | ---: | ---: |",
        *(
            f"| {name} | {one['requests']:.1f} | {one['useful']:.1%} |"
            for name, one in result["ways"].items()
        ),
    ]


def sharing(quick: bool) -> Result:
    lengths = held.sharegpt_lengths(2 if quick else 20, 1)
    with tempfile.TemporaryDirectory() as directory:
        model = shared.write_llama(Path(directory) / "small", layers=1, kv_heads=1, head_dim=16)
        sampled = {n: asdict(shared.sharing(model, lengths, n)) for n in ANSWERS}
        beams = {n: asdict(shared.sharing(model, lengths, n, beams=True)) for n in ANSWERS}
    return {"prompts": len(lengths), "sampled": sampled, "beams": beams}


def sharing_table(result: Result) -> list[str]:
    return [
        "| answers to a prompt | sampled: blocks saved | beam search: blocks saved |",
        "| ---: | ---: | ---: |",
        *(
            f"| {n} | {one['saved']:.1%} | {result['beams'][n]['saved']:.1%} |"
            for n, one in result["sampled"].items()
        ),
    ]


def ttft(quick: bool) -> Result:
    prefix = PREFIX // 8 if quick else PREFIX
    cold, warm = zip(*shared.first_tokens(prefix, SUFFIX, 1 if quick else 5), strict=True)
    return {"prefix": prefix, "suffix": SUFFIX, "cold_ms": cold, "warm_ms": warm}


def ttft_table(result: Result) -> list[str]:
    cold, warm = result["cold_ms"], result["warm_ms"]
    return [
        f"| TTFT of {result['prefix']} + {result['suffix']} tokens, ms | |",
        "| --- | ---: |",
        f"| cold | {Spread.of(cold)} |",
        f"| warm | {Spread.of(warm)} |",
        f"| cold / warm | {Spread.of([a / b for a, b in zip(cold, warm, strict=True)])} |",
    ]


def context(quick: bool) -> Result:
    budget = shared.GIB // (32 if quick else 1)
    # The cache of Llama 3.1 8B in float32: 256 KiB for a token.
    layers, kv_heads, head_dim = (1, 8, 128) if quick else (32, 8, 128)
    slots = budget // (layers * 2 * kv_heads * head_dim * 4)
    longest: dict[str, dict[int, tuple[int, int]]] = {}
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        model = shared.write_llama(Path(directory) / "m", layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        usable = slots // 16 - 1
        for scenario in shared.SCENARIOS:
            longest[scenario] = {
                users: (
                    shared.longest_paged(scenario, users, usable),
                    shared.longest_padded(scenario, users, slots),
                )
                for users in USERS
            }
        for scenario, users in POINTS:
            ours, theirs = longest[scenario][users]
            one, blocks = shared.run_paged(model, scenario, users, budget)
            assert (one.longest, blocks) == (ours, usable)
            other = shared.run_padded(model, scenario, users, theirs)
            assert max(one.cache_bytes, other.cache_bytes) <= budget
            runs.append({"scenario": scenario, "users": users, "ours": asdict(one), "mlx-lm": asdict(other)})
    return {"budget": budget, "longest": longest, "runs": runs}


def context_table(result: Result) -> list[str]:
    lines = ["| users | requests | ours | mlx-lm | |", "| ---: | --- | ---: | ---: | ---: |"]
    really = {(run["scenario"], run["users"]) for run in result["runs"]}
    for scenario, by_users in result["longest"].items():
        for users, (ours, theirs) in by_users.items():
            mark = " (run)" if (scenario, int(users)) in really else ""
            text = shared.SCENARIOS[scenario] + mark
            lines.append(f"| {users} | {text} | {ours:,} | {theirs:,} | {ours / theirs:.1f}x |")
    return lines


def under_arrivals(quick: bool) -> Result:
    options = (4.0, 3, 1) if quick else (0.4, 10, 2)
    return arrivals.compare(None, rate=options[0], requests=options[1], pairs=options[2])


PARTS: dict[str, tuple[Callable[[bool], Result], Callable[[Result], list[str]]]] = {
    "waste": (waste, waste_table),
    "held": (held_at_once, held_table),
    "sharing": (sharing, sharing_table),
    "ttft": (ttft, ttft_table),
    "context": (context, context_table),
    "arrivals": (under_arrivals, arrivals.table),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every part")
    which.add_argument("--parts", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--output-dir", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    names = list(PARTS) if arguments.all else arguments.parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    require_matplotlib()
    import memory_plots

    mx.set_default_device(mx.cpu)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    file = arguments.output_dir / "memory.json"
    # What other runs measured stays, each with its machine and time.
    results: Result = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        measure, table = PARTS[name]
        facts, begun = machine_facts(), time.perf_counter()
        # Through JSON at once: a table or a plot of a file is that of a run.
        result = json.loads(json.dumps(measure(arguments.quick)))
        seconds = round(time.perf_counter() - begun, 1)
        print(f"\n## {name} ({seconds} s)\n", *table(result), sep="\n", flush=True)
        results[name] = {
            **result,
            "quick": arguments.quick,
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "seconds": seconds,
            "machine": facts,
        }
        file.write_text(json.dumps(results, indent=1) + "\n")
        memory_plots.PLOTS[name](result, arguments.output_dir / f"memory-{name}.png")


if __name__ == "__main__":
    main()
