"""Parts of memory.py that run the engine: what sharing saves, a warm prefix, the longest context in a GiB."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx
from memory_held import Lengths, Tape
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from mlx_paged_attention import LLM, SamplingParams
from mlx_paged_attention.bench.contestant import measure
from mlx_paged_attention.bench.load import Load, Prompts
from mlx_paged_attention.bench.paged import PagedEngine
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.blocks_view import BlocksView

VOCABULARY = 512
GIB = 1 << 30

Scenario = Literal["equal", "one long", "one document"]
SCENARIOS: dict[Scenario, str] = {
    "equal": "all equally long",
    "one long": "one long, the others 128 tokens",
    "one document": "one document, 64 tokens of each one's own",
}
SHORT, OWN, ANSWER = 128, 64, 16


def write_llama(directory: Path, *, layers: int, kv_heads: int, head_dim: int) -> Path:
    """A Llama with random weights whose cache is as large as asked for, and all else small."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1 << 15,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    mx.random.seed(0)
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


@contextmanager
def watched(llm: LLM, every: float = 0.01) -> Iterator[list[BlocksView]]:
    """Look at the blocks again and again while the ``with`` block runs; the views in which requests run."""
    views: list[BlocksView] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(every):
            view = llm.blocks()
            if view.stats.used_blocks:
                views.append(view)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield views
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True)
class Shared:
    """Of one run: the share of blocks that sharing saved, and of slots that stayed empty."""

    saved: float
    waste: float
    looks: int


def sharing(model: Path, lengths: Lengths, n: int, *, beams: bool = False) -> Shared:
    """``n`` answers to each prompt, sampled or of a beam search, as ``LLM.blocks`` sees them."""
    prompts = Prompts(0, VOCABULARY)
    ids = [prompts.draw(f"sharing {i}", 1, prompt)[0] for i, (prompt, _) in enumerate(lengths)]
    way: dict[str, Any] = {"use_beam_search": True, "temperature": 0} if beams else {"seed": 0}
    params = [SamplingParams(n=n, max_tokens=output, ignore_eos=True, **way) for _, output in lengths]
    with (
        LLM(str(model), skip_tokenizer_init=True, num_blocks=1 << 14, max_num_seqs=256, device="cpu") as llm,
        watched(llm) as views,
    ):
        llm.generate(ids, params, use_tqdm=False)
    used = sum(view.stats.used_blocks for view in views)
    saved = sum(view.saved_blocks for view in views)
    empty = sum(view.empty_slots for view in views)
    return Shared(saved / (used + saved), empty / (used * 16), len(views))


def first_tokens(prefix_len: int, suffix_len: int, pairs: int) -> list[tuple[float, float]]:
    """Milliseconds to the first token, cold and warm, of prompts that have a prefix in common; in turns."""
    results = []
    with closing(PagedEngine("ours", EngineConfig(device="cpu", skip_tokenizer_init=True))) as engine:
        prompts = Prompts(0, engine.info.vocab_size)
        measure(engine, Load(prompts.draw("warm up", 1, prefix_len), 1))
        for pair in range(pairs):
            (prefix,) = prompts.draw(f"prefix {pair}", 1, prefix_len)
            one, two = prompts.draw(f"suffixes {pair}", 2, suffix_len)
            cold = measure(engine, Load([prefix + one], 1))
            warm = measure(engine, Load([prefix + two], 1))
            assert cold.cached_tokens == 0
            assert warm.cached_tokens >= prefix_len // 16 * 16
            results.append((cold.ttft * 1e3, warm.ttft * 1e3))
    return results


# ---- the longest context


def longest_paged(scenario: Scenario, users: int, num_blocks: int) -> int:
    """Tokens of prompt and answer of the longest request, where the pool has ``num_blocks`` to give."""

    def blocks(tokens: int) -> int:
        return -(-tokens // 16)

    match scenario:
        case "equal":
            return num_blocks // users * 16
        case "one long":
            return (num_blocks - (users - 1) * blocks(SHORT)) * 16
        case "one document":
            return (num_blocks - (users - 1) * blocks(OWN)) * 16


def loads(scenario: Scenario, users: int, longest: int) -> list[list[int]]:
    """Prompts whose longest, with its answer, has ``longest`` tokens."""
    prompts = Prompts(0, VOCABULARY)
    match scenario:
        case "equal":
            return prompts.draw("equal", users, longest - ANSWER)
        case "one long":
            others = prompts.draw("others", users - 1, SHORT - ANSWER) if users > 1 else []
            return prompts.draw("long", 1, longest - ANSWER) + others
        case "one document":
            (document,) = prompts.draw("document", 1, longest - OWN)
            return [document + own for own in prompts.draw("own", users, OWN - ANSWER)]


def batch_bytes(model: Any, prompts: Sequence[list[int]], stop_above: float = float("inf")) -> int:
    """Bytes of mlx-lm's caches, at most, while it answers all these prompts at once."""
    generator = BatchGenerator(
        model,
        max_tokens=ANSWER,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        stop_tokens=[],
    )
    try:
        running = len(generator.insert([list(prompt) for prompt in prompts]))
        most = 0
        while running and most <= stop_above:
            _, responses = generator.next()
            running -= sum(response.finish_reason is not None for response in responses)
            most = max(most, generator.prompt_cache_nbytes)
        return most
    finally:
        generator.close()


def longest_padded(scenario: Scenario, users: int, slots: int) -> int:
    """The longest request that mlx-lm's arrays hold beside the others, tried on its own classes."""
    tape = Tape()
    least, most = OWN + ANSWER, slots + 1
    while most - least > 1:
        middle = (least + most) // 2
        fits = batch_bytes(tape, loads(scenario, users, middle), slots * 8) <= slots * 8
        least, most = (middle, most) if fits else (least, middle)
    return least


@dataclass(frozen=True)
class Run:
    """A point that was really run.

    Attributes:
        longest: tokens of the longest request.
        cache_bytes: of keys and values, at most.
    """

    longest: int
    cache_bytes: int
    seconds: float


def run_paged(model: Path, scenario: Scenario, users: int, budget: int) -> tuple[Run, int]:
    """Fill a pool of ``budget`` bytes to its last block; also the blocks it has to give."""
    with LLM(
        str(model),
        skip_tokenizer_init=True,
        kv_memory=budget,
        max_num_seqs=16,
        device="cpu",
    ) as llm:
        usable = llm.info.num_blocks - 1
        longest = longest_paged(scenario, users, usable)
        begun = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        with watched(llm) as views:
            outputs = llm.generate(loads(scenario, users, longest), params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        stats = llm.stats()
        assert all(len(output.outputs[0].token_ids) == ANSWER for output in outputs)
        assert stats.preemptions == 0, "it did not fit at once"
        assert max(view.stats.running for view in views) == users
        return Run(longest, stats.pool_bytes, seconds), usable


def run_padded(model: Path, scenario: Scenario, users: int, longest: int) -> Run:
    """The same with mlx-lm's batch."""
    loaded, _ = load_model(model)
    begun = time.perf_counter()
    most = batch_bytes(loaded, loads(scenario, users, longest))
    return Run(longest, most, time.perf_counter() - begun)
