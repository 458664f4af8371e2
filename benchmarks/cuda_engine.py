"""The engine on a GPU: is it right, how long does a decode step take, how fast is a batch of requests?

    python benchmarks/cuda_engine.py [--parts recipe,decode,identity,long,parity] [--profile] ...

Models are of Qwen3's shapes with random weights, made here. Prints tables as it goes, in under eight minutes
on an H200; a part that fails does not stop the others.

* parity: greedy generation of tiny models against mlx-lm, in the test suite, with full float32 products.
* decode: milliseconds per step of rows with contexts of 512 to 1024 tokens, against mlx-lm's batch of
  contiguous caches in the same run, and against the time that reading weights, keys and values takes.
* identity: 2,000 steps, each launched before the one before is read, and the memory they take.
* long: one request of 131,072 tokens, against mlx-lm's own generation.
* recipe: 256 requests, prompt and output lengths uniform in 100 to 1024, all at once, here and in mlx-lm's
  BatchGenerator, one after the other on the same machine.
"""

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen3
from mlx_lm.models.cache import BatchKVCache

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.engine import Engine
from mlx_paged_attention.engine.loading import LoadedEngine, choose_backend, prepare_engine
from mlx_paged_attention.models.load import LoadedModel
from mlx_paged_attention.sampling.params import RowSampling, SamplingParams
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN, NewRow, PlannedRow, StepPlan

SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
VOCABULARY = 151936
ROWS = (1, 8, 64, 256)
CONTEXTS = (512, 1024)
TIMED_SECONDS = 1.0  # per measurement, 8 steps at least

RECIPE_POOL_BYTES = 22 * 10**9


def make_model(shape: str, bits: int | None) -> nn.Module:
    """A model with random weights in bfloat16, its linear layers in ``bits`` bits unless ``None``."""
    mx.random.seed(0)
    arguments = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": VOCABULARY,
        **SHAPES[shape],
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(arguments))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    model.eval()
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)  # one at a time: random numbers are made in float32
    return model


def start(
    model: nn.Module, name: str, *, longest: int = 40960, **options: Any
) -> tuple[EngineConfig, LoadedEngine]:
    config = EngineConfig(skip_tokenizer_init=True, device="gpu", **options)
    backend = choose_backend(config)
    loaded = LoadedModel(
        model=model,
        config={},
        dtype="bfloat16",
        quantisation=None,
        fingerprint="0" * 64,
        vocab_size=VOCABULARY,
        max_model_len=longest,
        eos_token_ids=[],
    )
    return config, prepare_engine(config, loaded, name, backend, lambda _: None)


def release() -> None:
    gc.collect()
    mx.clear_cache()


def measured(step: Callable[[], Any], warm_up: int = 4) -> float:
    """Median milliseconds of a step."""
    for _ in range(warm_up):
        step()
    times: list[float] = []
    while len(times) < 8 or sum(times) < TIMED_SECONDS:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
        if len(times) == 100 or (len(times) >= 3 and sum(times) > 3 * TIMED_SECONDS):
            break
    return 1e3 * statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of a large array."""
    x = mx.zeros(1 << 30, mx.bfloat16)
    mx.eval(x)
    times = []
    for _ in range(8):
        begun = time.perf_counter()
        mx.eval(x + 1)
        times.append(time.perf_counter() - begun)
    return 2 * x.nbytes / min(times)


# ---- parity


def parity() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "tests/models/test_parity.py", "-q", "-x", "--tb=short"]
    command += ["-k", "(llama] or qwen3] or gemma3]) and not chunks and not grid", "-p", "no:cacheprovider"]
    environment = os.environ | {"MLX_ENABLE_TF32": "0", "PYTHONPATH": str(root)}
    try:
        subprocess.run(command, cwd=root, env=environment, timeout=170, check=False)
    except subprocess.TimeoutExpired:
        print("not finished in 170 s")


# ---- decode


def contexts_of(rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rows).integers(*CONTEXTS, rows)


def mlx_lm_step(model: nn.Module, rows: int) -> Callable[[], None]:
    """A step as mlx-lm's generator runs it: launched, then the one before is waited for."""
    contexts = contexts_of(rows)
    longest, heads, dim = int(contexts.max()), 8, 128
    caches = []
    for _ in model.layers:
        cache = BatchKVCache((longest - contexts).tolist())
        keys, values = (
            mx.zeros((rows, heads, -(-longest // 256) * 256 + 256, dim), mx.bfloat16) for _ in "kv"
        )
        cache.state = (keys, values, mx.array(contexts), mx.array(longest - contexts), longest)
        caches.append(cache)
    mx.eval([cache.state[:2] for cache in caches])
    last = mx.zeros(rows, mx.int32)

    def step() -> None:
        nonlocal last
        before = last
        last = mx.argmax(model(before[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(last)
        before.tolist()

    return step


class OurStep:
    """Steps of hand-made plans on a runner, every row one token further, launched as the engine does."""

    def __init__(self, engine: LoadedEngine, rows: int, number: int, steps: int = 256) -> None:
        self._runner = engine.runner
        self._contexts = contexts_of(rows)
        self._names = [f"{number}-{row}" for row in range(rows)]
        self._before: Any = None
        self._blocks: list[list[int]] = []
        first, size = 1, engine.info.block_size
        for context in self._contexts.tolist():
            count = -(-(context + steps) // size)
            self._blocks.append(list(range(first, first + count)))
            first += count
        assert first <= engine.info.num_blocks
        self._step = 0

    def __call__(self) -> None:
        new = []
        if self._step == 0:
            new = [
                NewRow(name, [0] * int(context + 1), int(context + 1), RowSampling(temperature=0.0))
                for name, context in zip(self._names, self._contexts, strict=True)
            ]
        rows = []
        token = UNKNOWN_TOKEN if self._step else 0
        for name, blocks, context in zip(self._names, self._blocks, self._contexts.tolist(), strict=True):
            begin = context + self._step
            rows.append(PlannedRow(name, [token], begin, [] if self._step else blocks, begin, sample=True))
        launched = self._runner.launch(StepPlan(self._step, new, rows, []))
        if self._before is not None:
            self._before.read()
        self._before = launched
        self._step += 1


def decode(bandwidth: float, models: list[str], profile: bool) -> None:
    print("model   rows | mlx-lm ms | paged ms  ratio | floor ms  of floor")
    for shape, bits in (("0.6B", None), ("0.6B", 4), ("8B", None), ("8B", 4)):
        name = f"{shape} {'bf16' if bits is None else f'{bits}-bit'}"
        if name not in models:
            continue
        model = make_model(shape, bits)
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        if not SHAPES[shape]["tie_word_embeddings"]:
            weights -= sum(a.nbytes for _, a in tree_flatten(model.model.embed_tokens.parameters()))
        theirs = {}
        for rows in ROWS:  # before anything of the model is wrapped
            if bits and rows > 64:  # one problem per row: seconds per step
                continue
            try:
                theirs[rows] = measured(mlx_lm_step(model, rows))
            except Exception as error:
                print(f"{name} {rows}: mlx-lm: {type(error).__name__}: {error}")
            release()
        size, most = 16, max(ROWS)
        blocks = 1 + int(sum(-(-(context + 256) // size) for context in contexts_of(most)))
        begun = time.perf_counter()
        _, engine = start(model, name, num_blocks=blocks, max_model_len=4096, max_num_seqs=most)
        print(f"{name}: runs as {engine.info.forward}, ready after {time.perf_counter() - begun:.1f} s")
        for number, rows in enumerate(ROWS):
            step = OurStep(engine, rows, number)
            ours = measured(step)
            keys = int(contexts_of(rows).sum()) * engine.info.bytes_per_token
            floor = 1e3 * (weights + keys) / bandwidth
            other = theirs.get(rows, float("nan"))
            print(
                f"{name:9} {rows:3} | {other:9.2f} | {ours:8.2f}  {other / ours:5.2f} | "
                f"{floor:8.2f}  {floor / ours:8.0%}",
                flush=True,
            )
            if profile and bits is None and rows in (1, 64):
                profiled(lambda step=step: [step() for _ in range(30)])
        del engine, step, model
        release()


def profiled(run: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    statistic = pstats.Stats(profiler)
    statistic.sort_stats("tottime").print_stats(22)


# ---- identity


def identity() -> None:
    model = make_model("0.6B", None)
    rows, steps = 8, 2000
    blocks = 1 + int(sum(-(-(context + steps + 8) // 16) for context in contexts_of(rows)))
    _, engine = start(model, "0.6B", num_blocks=blocks, max_model_len=4096, max_num_seqs=rows)
    step = OurStep(engine, rows, 0, steps + 8)
    for _ in range(4):
        step()
    release()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(steps):
        step()
    above = mx.get_peak_memory() - before
    print(
        f"{steps} steps of {rows} rows, pool {engine.info.pool_bytes / 1e6:.0f} MB: "
        f"at most {above / 1e6:.1f} MB more"
    )


# ---- long


def long() -> None:
    tokens, answer = 131_072, 8
    model = make_model("0.6B", None)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, tokens)
    begun = time.perf_counter()
    first = None
    theirs = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=answer):
        first = first or time.perf_counter() - begun
        theirs.append(int(token))
    print(f"mlx-lm: first token after {first:.1f} s, {time.perf_counter() - begun:.1f} s in all: {theirs}")
    release()
    config, loaded = start(
        model, "0.6B", longest=tokens + 64, kv_memory=22 * 10**9, max_num_batched_tokens=2048, max_num_seqs=8
    )
    engine = Engine(config, loaded.info, loaded.runner, loaded.fingerprint, None)
    for run in ("cold", "warm"):
        outputs: list[Any] = []
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        begun, first = time.perf_counter(), None
        engine.add(engine.prepare(run, prompt.tolist(), params, kind="cumulative", emit=outputs.append))
        while engine.has_work:
            engine.step()
            if outputs and first is None:
                first = time.perf_counter() - begun
        ours = outputs[-1].outputs[0].token_ids
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        print(
            f"{run}: first token after {first:.1f} s, {time.perf_counter() - begun:.1f} s in all, "
            f"{outputs[-1].num_cached_tokens} tokens cached; {same} of {answer} tokens as mlx-lm: {ours}"
        )
        engine.reset_prefix_cache()


# ---- recipe


def requests() -> Iterator[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    for prompt, output in zip(rng.integers(100, 1025, 256), rng.integers(100, 1025, 256), strict=True):
        yield rng.integers(0, VOCABULARY, prompt).tolist(), int(output)


def recipe(profile: bool, budgets: list[int]) -> None:
    mlx_lm = mlx_lm_recipe()
    release()
    for budget in budgets:
        run_recipe(profile and budget == budgets[-1], budget, mlx_lm)
        release()


def mlx_lm_recipe() -> float:
    """Output tokens per second of mlx-lm's BatchGenerator, all requests in one batch."""
    model = make_model("0.6B", None)
    prompts, outputs = zip(*requests(), strict=True)
    mx.reset_peak_memory()
    generator = BatchGenerator(model, stop_tokens=[], completion_batch_size=len(prompts))
    begun = before = time.perf_counter()
    generator.insert(list(prompts), max_tokens=list(outputs))
    running, gaps = len(prompts), []
    while running:
        _, responses = generator.next()
        running -= sum(response.finish_reason is not None for response in responses)
        if responses:
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
    total = time.perf_counter() - begun
    generator.close()
    gaps.sort()
    speed, p99 = sum(outputs) / total, gaps[int(0.99 * len(gaps))]
    print(
        f"mlx-lm: {sum(outputs)} output tokens in {total:.2f} s: {speed:.0f} tokens/s\n"
        f"  step gap: median {1e3 * statistics.median(gaps):.1f} ms, p99 {1e3 * p99:.1f}, "
        f"longest {1e3 * gaps[-1]:.1f}; peak memory {mx.get_peak_memory() / 1e9:.1f} GB",
        flush=True,
    )
    return speed


def run_recipe(profile: bool, budget: int, mlx_lm: float) -> None:
    model = make_model("0.6B", None)
    config, loaded = start(
        model, "0.6B", kv_memory=RECIPE_POOL_BYTES, max_model_len=2304, max_num_seqs=256,
        max_num_batched_tokens=budget, enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config, loaded.info, loaded.runner, loaded.fingerprint, None)
    print(
        f"runs as {loaded.info.forward}, a pool of {loaded.info.pool_bytes / 1e9:.1f} GB, "
        f"at most {loaded.info.max_num_batched_tokens} tokens a step"
    )
    for run in ("cold", "warm", *(["profiled"] if profile else [])):
        mx.reset_peak_memory()
        for number, (prompt, output) in enumerate(requests()):
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            engine.add(engine.prepare(f"{run}{number}", prompt, params, kind="final", emit=lambda _: None))
        # As `mlx-paged serve` does: a collection that walks all that loading made takes 0.3 s.
        gc.collect()
        gc.freeze()
        if run == "profiled":
            profiled(lambda: drain(engine))
            continue
        report(run, mlx_lm, *drain(engine), engine.stats().preemptions)


def drain(engine: Engine) -> tuple[list[float], list[float], list[int]]:
    """Step until nothing is left: seconds between steps' ends, of them in the runner; each step's tokens."""
    steps, inside, sizes = [], [], []
    launch = engine._runner.launch

    def timed(function: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = function()
        inside.append(time.perf_counter() - begun)
        return result

    def launch_timed(plan: StepPlan) -> Any:
        launched = timed(lambda: launch(plan))
        read = launched.read

        def read_timed() -> Any:
            sizes.append(plan.num_tokens)
            return timed(read)

        launched.read = read_timed
        return launched

    engine._runner.launch = launch_timed  # type: ignore[method-assign]
    try:
        begun = time.perf_counter()
        while engine.has_work:
            landed = len(sizes)
            engine.step()
            if len(sizes) > landed:
                now = time.perf_counter()
                steps.append(now - begun)
                begun = now
    finally:
        del engine._runner.launch
    return steps, inside, sizes


def report(
    run: str, mlx_lm: float, steps: list[float], inside: list[float], sizes: list[int], preemptions: int
) -> None:
    tokens, total = sum(output for _, output in requests()), sum(steps)
    gaps = sorted(steps)
    median, p99 = statistics.median(gaps), gaps[int(0.99 * len(gaps))]
    speed = tokens / total
    print(
        f"{run}: {tokens} output tokens in {total:.2f} s: {speed:.0f} tokens/s, "
        f"{speed / mlx_lm:.1f}x mlx-lm; {len(steps)} steps, {preemptions} preemptions\n"
        f"  step gap: median {1e3 * median:.1f} ms, p90 {1e3 * gaps[int(0.9 * len(gaps))]:.1f}, "
        f"p99 {1e3 * p99:.1f} ({p99 / median:.1f}x), longest {1e3 * gaps[-1]:.1f}\n"
        f"  outside the runner {sum(steps) - sum(inside):.2f} s; "
        f"peak memory {mx.get_peak_memory() / 1e9:.1f} GB",
        flush=True,
    )
    large = [1e3 * seconds for seconds, tokens in zip(steps, sizes, strict=True) if tokens > 256]
    small = [1e3 * seconds for seconds, tokens in zip(steps, sizes, strict=True) if tokens <= 256]
    print(
        f"  {len(large)} steps with chunks, {statistics.mean(large):.1f} ms each; "
        f"{len(small)} of at most a token per request, {statistics.mean(small):.1f} ms"
    )
    tenth = len(steps) // 10
    means = [1e3 * statistics.mean(steps[i * tenth : (i + 1) * tenth]) for i in range(10)]
    print("  mean ms by tenths of the run:", " ".join(f"{mean:.1f}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="recipe,decode,identity,long,parity")
    parser.add_argument(
        "--models", default="0.6B bf16,0.6B 4-bit,8B bf16,8B 4-bit", help="of the part decode"
    )
    parser.add_argument("--budgets", default="1024", help="the recipe's token budgets of a step")
    parser.add_argument("--profile", action="store_true", help="also say where the host's time goes")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name')}, copy {bandwidth / 1e9:.0f} GB/s")
    release()
    parts: dict[str, Callable[[], None]] = {
        "parity": parity,
        "identity": identity,
        "long": long,
        "decode": lambda: decode(bandwidth, arguments.models.split(","), arguments.profile),
        "recipe": lambda: recipe(arguments.profile, [int(budget) for budget in arguments.budgets.split(",")]),
    }
    for name in arguments.parts.split(","):
        begun = time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()
        print(f"[{name}: {time.perf_counter() - begun:.0f} s]", flush=True)
        release()


if __name__ == "__main__":
    main()
