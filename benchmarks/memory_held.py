"""Parts of memory.py: what blocks waste, and how many requests a fixed memory holds. No model is computed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_paged_attention.cache.block_hash import root_hash
from mlx_paged_attention.cache.block_map import map_blocks
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import RowOutput, StepOutput

# First turns of ShareGPT: log-normal lengths in tokens, after the filter that benchmarks of servers use.
PROMPTS, OUTPUTS = (4.48, 1.56), (4.53, 1.45)
LONGEST_PROMPT, LONGEST = 1024, 2048

Lengths = list[tuple[int, int]]


def sharegpt_lengths(count: int, seed: int) -> Lengths:
    """(prompt, output) tokens of ``count`` requests."""
    rng = random.Random(seed)
    lengths: Lengths = []
    while len(lengths) < count:
        prompt, output = int(rng.lognormvariate(*PROMPTS)), int(rng.lognormvariate(*OUTPUTS))
        if 4 <= prompt <= LONGEST_PROMPT and output >= 4 and prompt + output <= LONGEST:
            lengths.append((prompt, output))
    return lengths


@dataclass(frozen=True)
class Held:
    """What was held while requests waited for room, averaged over steps.

    Attributes:
        requests: running at once.
        useful: slots with a token, as a share of the whole memory.
        waste: slots without one, as a share of the slots that were given to requests.
    """

    requests: float
    useful: float
    waste: float

    @classmethod
    def of(cls, samples: Sequence[tuple[int, int, int]], slots: int) -> "Held":
        """Of (requests, slots with a token, slots given) at several moments."""
        requests, filled, given = np.array(samples, np.float64).T
        return cls(
            float(requests.mean()), float(filled.mean() / slots), float(1 - filled.sum() / given.sum())
        )


def paged(lengths: Lengths, block_size: int, slots: int) -> Held:
    """Requests in turn through the scheduler, as the engine plans them, in a pool of ``slots``."""
    manager = KVCacheManager(
        1 + slots // block_size, block_size, enable_caching=False, root_hash=root_hash("0" * 64)
    )
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=LONGEST)
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add_request(Request(str(i), [1] * prompt, RowSampling(temperature=0.0), max_tokens=output))
    samples = []
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        rows = [RowOutput(row.request_id, [1]) for row in plan.rows if row.sample]
        scheduler.update(plan, StepOutput(plan.step, rows))
        if plan.step % 4 == 0:
            given = (manager.num_usable_blocks - manager.num_free_blocks) * block_size
            empty = map_blocks(manager.pool.blocks, manager.held_tables()).empty_slots
            samples.append((scheduler.num_running, given - empty, given))
    return Held.of(samples[len(samples) // 2 :], slots)  # once requests of all ages are in it


def reserved(lengths: Lengths, slots: int, *, exact: bool) -> Held:
    """Memory set aside when a request starts: for the longest there may be, or for its very length."""
    filled = sum(prompt + i for prompt, output in lengths for i in range(output))
    steps = sum(output for _, output in lengths)
    given = sum((prompt + output if exact else LONGEST) * output for prompt, output in lengths)
    requests = slots / (given / steps) if exact else slots // LONGEST
    return Held(requests, requests * (filled / steps) / slots, 1 - filled / given)


class Tape(nn.Module):
    """A model that only fills its cache: one layer, one head, one number per key."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Identity()]

    def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> mx.array:
        rows, tokens = inputs.shape
        new = mx.zeros((rows, 1, tokens, 1))
        keys, _ = cache[0].update_and_fetch(new, new)
        return mx.zeros((rows, tokens, 2)) + 0 * keys.sum()


_BYTES_PER_SLOT = 2 * 4  # a key and a value of ``Tape``


def padded(lengths: Lengths, batch: int) -> Iterator[tuple[int, int, int]]:
    """mlx-lm's BatchGenerator, ``batch`` requests at once.

    Yields, after each step while requests wait: requests, slots with a token, slots of its arrays.
    """
    generator = BatchGenerator(
        Tape(), completion_batch_size=batch, prefill_batch_size=min(8, batch), stop_tokens=[]
    )
    prompts = [[0] * prompt for prompt, _ in lengths]
    uids = generator.insert(prompts, max_tokens=[output for _, output in lengths])
    known = dict(zip(uids, (prompt for prompt, _ in lengths), strict=True))
    running: dict[int, int] = {}
    waiting = len(uids)
    while waiting or running:
        begun, responses = generator.next()
        for one in begun:
            if one.end_of_prompt:
                running[one.uid] = known[one.uid]
                waiting -= 1
        for response in responses:
            running[response.uid] += 1
            if response.finish_reason is not None:
                del running[response.uid]
        given = generator.prompt_cache_nbytes // _BYTES_PER_SLOT
        if waiting:
            yield len(running), min(given, sum(running.values())), given
    generator.close()


def largest_padded(lengths: Lengths, slots: int) -> tuple[int, Held]:
    """The largest batch whose arrays never exceed ``slots`` on these requests, and what it holds."""

    def fits(batch: int) -> Held | None:
        samples = []
        for sample in padded(lengths, batch):
            if sample[2] > slots:
                return None
            samples.append(sample)
        return Held.of(samples[len(samples) // 2 :], slots)

    least = slots // LONGEST  # these cannot exceed it
    most, held = 2 * least, fits(least)
    assert held is not None, "not even the longest ones fit"
    while (larger := fits(most)) is not None:
        least, most, held = most, 2 * most, larger
    while most - least > 1:
        middle = (least + most) // 2
        if (one := fits(middle)) is None:
            most = middle
        else:
            least, held = middle, one
    return least, held
