"""What a grammar costs per step: filling its masks, and sampling with them, on a model's real vocabulary.

    python benchmarks/structured_outputs.py [--model ...] [--rows 1 32] [--steps 60]

The rows follow random JSON of a schema; logits are random, no model runs. Times are medians of the steps, in
milliseconds. Masks are filled while the forward pass runs, so that their time shows only where it is longer.
"""

import argparse
import statistics
import time

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx

from mlx_paged_attention.api.start import load_tokenizer
from mlx_paged_attention.models.source import resolve
from mlx_paged_attention.sampling.grammar import MaskFiller
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import launch
from mlx_paged_attention.sampling.structured_outputs import StructuredOutputsParams

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "weight": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "weight", "tags"],
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    mx.set_default_device(mx.gpu if mx.metal.is_available() or mx.cuda.is_available() else mx.cpu)
    tokenizer = load_tokenizer(resolve(arguments.model))
    began = time.perf_counter()
    source = tokenizer.grammars.compile(StructuredOutputsParams(json=SCHEMA))
    print(f"first grammar, the tokenizer's preparation included: {time.perf_counter() - began:.2f} s")
    other = StructuredOutputsParams(json=SCHEMA | {"minItems": 999})
    began = time.perf_counter()
    tokenizer.grammars.compile(other)
    print(f"another grammar: {1000 * (time.perf_counter() - began):.1f} ms\n")
    print("| rows | fill masks | sample with masks | sample without |\n|---|---|---|---|")
    vocab = tokenizer.vocab_size
    filler = MaskFiller(tokenizer.grammars)
    for count in arguments.rows:
        fills, masked, free = [], [], []
        rows = [
            SamplingRow(
                [0],
                1,
                RowSampling(temperature=1.0, seed=seed, grammar=source, stop_ids=[*tokenizer.eos_token_ids]),
                tokenizer.grammars.new_matcher(source),
            )
            for seed in range(count)
        ]
        for step in range(arguments.steps):
            logits = mx.random.normal((count, vocab), key=mx.random.key(step))
            mx.eval(logits)
            times = [time.perf_counter()]
            masks = filler.fill(rows)
            times.append(time.perf_counter())
            sampled = launch(logits, rows, masks).read()
            times.append(time.perf_counter())
            launch(logits, rows).read()
            times.append(time.perf_counter())
            for row, result in zip(rows, sampled, strict=True):
                row.append(result.token_id)
            for series, start in zip((fills, masked, free), range(3), strict=True):
                series.append(1000 * (times[start + 1] - times[start]))
        cells = " | ".join(f"{statistics.median(series):.2f}" for series in (fills, masked, free))
        print(f"| {count} | {cells} |")


if __name__ == "__main__":
    main()
