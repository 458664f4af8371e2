"""Ways into a running engine that only tests need."""

import queue
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlx_paged_attention import LLM, AsyncLLM, SamplingParams
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.engine.engine import Engine
from mlx_paged_attention.engine.outputs import EngineStats, RequestOutput
from mlx_paged_attention.engine.runner_interface import LaunchedStep
from mlx_paged_attention.ops.layer import AttentionLayer
from mlx_paged_attention.scheduler.step_plan import StepPlan

AnyLLM = LLM | AsyncLLM
Result = TypeVar("Result")


def engine_of(llm: AnyLLM) -> Engine:
    return llm._engine._engine


def block_pool(llm: AnyLLM) -> BlockPool:
    return engine_of(llm)._cache.pool


def kv_layers(llm: AnyLLM) -> list[AttentionLayer]:
    return engine_of(llm)._runner._pool.layers


def between_steps(llm: AnyLLM, function: Callable[[], Result]) -> Result:
    """Run ``function`` on the engine's thread when no step is under way."""
    result: queue.SimpleQueue[Result] = queue.SimpleQueue()
    llm._engine._send(lambda: result.put(function()))
    return result.get(timeout=60)


def settled_stats(llm: AnyLLM) -> EngineStats:
    """The counts once everything sent to the engine so far has been taken in."""
    return between_steps(llm, engine_of(llm).stats)


def check_books(llm: AnyLLM) -> None:
    """Every invariant of block tables and block pool."""
    between_steps(llm, engine_of(llm)._cache.check)


def start_together(llm: AnyLLM, count: int) -> None:
    """Let the engine plan its next step only when ``count`` more requests have reached it."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while llm._engine._commands.qsize() < count:
            assert time.monotonic() < deadline, f"{count} requests never came"
            time.sleep(0.001)

    llm._engine._send(wait)


def shuffle_free_blocks(llm: AnyLLM, seed: int) -> None:
    """Put the free queue into random order, so that block tables are no longer ascending."""

    def shuffle() -> None:
        free = block_pool(llm).free_queue
        blocks = free.get_all()
        for block in blocks:
            free.remove(block)
        random.Random(seed).shuffle(blocks)
        free.append_n(blocks)

    between_steps(llm, shuffle)


def block_planes(layer: Any) -> list[Any]:
    """A layer's keys and values, ``[blocks, kv_heads, block_size, head_dim]``: views."""
    planes = [layer.k, layer.v]
    return [plane.swapaxes(0, 1) if isinstance(plane, np.ndarray) else plane for plane in planes]


def poison_free_blocks(llm: AnyLLM) -> None:
    """Fill every block whose contents nobody may read, the null block included, with NaN."""

    def poison() -> None:
        pool = block_pool(llm)
        ids = [0] + [block.block_id for block in pool.free_queue.get_all() if block.block_hash is None]
        for layer in kv_layers(llm):
            for plane in block_planes(layer):
                plane[np.array(ids) if isinstance(plane, np.ndarray) else mx.array(ids)] = float("nan")

    between_steps(llm, poison)


@contextmanager
def recorded_plans(llm: AnyLLM) -> Iterator[list[StepPlan]]:
    """Collect the plan of every step run inside the ``with`` block."""
    plans: list[StepPlan] = []
    with wrapped_launch(llm, plans.append):
        yield plans


@contextmanager
def wrapped_launch(llm: AnyLLM, before: Callable[[StepPlan], Any]) -> Iterator[None]:
    """Call ``before`` with every plan, on the engine's thread, just before it is run."""
    runner = engine_of(llm)._runner
    launch = runner.launch

    def wrapped(plan: StepPlan) -> LaunchedStep:
        before(plan)
        return launch(plan)

    runner.launch = wrapped
    try:
        yield
    finally:
        runner.launch = launch


def submit(
    llm: AnyLLM, prompt: list[int], params: SamplingParams, request_id: str | None = None
) -> Callable[[], RequestOutput]:
    """Queue a request from any thread, the engine's own included; the returned function waits for it."""
    result: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
    engine = llm._engine
    request_id = request_id or uuid.uuid4().hex
    engine.start(engine.prepare(request_id, prompt, params, kind="final", emit=result.put))

    def wait() -> RequestOutput:
        output = result.get(timeout=60)
        if isinstance(output, Exception):
            raise output
        return output

    return wait


def preempt_everything(llm: AnyLLM) -> None:
    """Before its next step the engine takes all blocks from all requests and forgets all prefixes."""
    scheduler = engine_of(llm)._scheduler
    llm._engine._send(lambda: scheduler.reset_prefix_cache(reset_running_requests=True))


@contextmanager
def token_budget(llm: AnyLLM, tokens: int) -> Iterator[None]:
    """Let steps that are planned inside the ``with`` block compute ``tokens`` at most."""
    scheduler = engine_of(llm)._scheduler
    before = scheduler.max_num_batched_tokens, scheduler._prefill.threshold

    def set_budget(budget: int, threshold: int) -> None:
        scheduler.max_num_batched_tokens, scheduler._prefill.threshold = budget, threshold

    between_steps(llm, lambda: set_budget(tokens, tokens))
    try:
        yield
    finally:
        between_steps(llm, lambda: set_budget(*before))
