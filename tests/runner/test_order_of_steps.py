"""Whole steps on kernels, as the runner and mlx-lm's generation make them, keep the order that was stated.

Each program runs the real code on kernels that compute nothing but are recorded; see ``order_checker``. Then
each kernel of it is deprived of its token, and each place of the code that hands tokens on forgets to.
"""

import copy
import sys
from collections import deque

import mlx.core as mx
import mlx_lm
import pytest
from fake_runner import make_manager, make_request
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.utils import load_model
from oracle import varied_prompt
from order_checker import hazards, recording, unnoticed
from step_driver import BLOCK_SIZE, PACKED, ROWS, StepDriver, load_host
from tiny_models import VOCAB_SIZE
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mlx_paged_attention import make_paged_cache
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.runner import compiled_step, paged_cache
from mlx_paged_attention.runner.grouping import choose_groups
from mlx_paged_attention.runner.kv_pool import KernelPool, make_pool
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.scheduler.scheduler import Scheduler

COMPILED, COMPILED_ROWS = PACKED.with_compiled_steps(), ROWS.with_compiled_steps()


def driver_of(directory, layout):
    driver = StepDriver(*load_host(directory), layout, on_host=False)
    assert isinstance(driver.runner._pool, KernelPool)
    return driver


def serve(directory, layout, prompts, *, num_blocks, budget=64, max_tokens=4):
    """Requests through scheduler and runner until all have ended; the scheduler and its plans.

    As in the engine, a step is launched before the one before it has been read.
    """
    host, spec = load_host(directory)
    groups = choose_groups(spec, layout).groups
    windows = tuple(group.window for group in groups)
    options = {"partial_hits": True, "windows": windows, "max_step_tokens": budget}
    manager = make_manager(num_blocks, BLOCK_SIZE, **options)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=200)
    runner = ModelRunner(host, spec, make_pool(spec, num_blocks, host=False, groups=groups), layout)
    for i, prompt in enumerate(prompts):
        scheduler.add_request(make_request(str(i), prompt, max_tokens=max_tokens))
    plans, in_flight = [], deque()
    while scheduler.has_unfinished_requests or in_flight:
        plan = scheduler.schedule(ahead=True)
        if plan.rows:
            plans.append(plan)
            in_flight.append((plan, runner.launch(plan)))
        assert in_flight
        if len(in_flight) > 1 or not plan.rows:
            plan, launched = in_flight.popleft()
            scheduler.update(plan, launched.read())
    return scheduler, plans


def feed(model, cache, length, count=3, chunk=2048):
    """Generation as in ``mlx_lm.generate``, without a tokenizer."""
    prompt = mx.array(varied_prompt(length, length))
    for _ in generate_step(prompt, model, max_tokens=count, prompt_cache=cache, prefill_step_size=chunk):
        pass


def tokenizer():
    """Generation asks for one, even if it is given token ids."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(VOCAB_SIZE - 1))


# ---- Programs


def decode(directory):
    driver = driver_of(directory, COMPILED)
    for request, length in (("a", 21), ("b", 5), ("c", 1)):
        driver.add(request, varied_prompt(length, length))
    driver.step(a=21, b=5, c=1)
    for _ in range(5):
        driver.step(a=1, b=1, c=1)


def mixed(directory):
    driver = driver_of(directory, COMPILED_ROWS)
    for request, length in (("a", 21), ("b", 40), ("c", 7)):
        driver.add(request, varied_prompt(length, length))
    driver.step(a=21)
    driver.step(a=1, b=20)  # chunks long enough to be attended to by MLX over gathered keys
    driver.step(a=1, b=20, c=3)
    driver.step(c=4, a=1, b=1)
    driver.step(a=1, b=1, c=1)


def mixed_and_packed(directory):
    driver = driver_of(directory, COMPILED)
    for request, length in (("a", 21), ("b", 60)):
        driver.add(request, varied_prompt(length, length))
    driver.step(a=21, b=10)
    driver.step(a=1, b=10)
    driver.step(a=1, b=40)
    driver.step(a=1, b=1)


def shared_in_one_step(directory, layout=COMPILED_ROWS):
    prompt = varied_prompt(40, 1)
    others = [prompt[:32] + varied_prompt(20, 2), prompt[:32]]  # the last one finds all of itself
    scheduler, plans = serve(directory, layout, [prompt, *others], num_blocks=20, budget=128)
    assert [row.start for row in plans[0].rows] == [0, 32, 31]
    assert plans[0].rows[2].write_from == 32
    assert scheduler.manager.stats.hits == 32 + 31


def shared_in_one_step_and_packed(directory):
    shared_in_one_step(directory, COMPILED)


def parted_within_a_block(directory, layout=COMPILED):
    """Blocks of a prompt that has been computed are copied, for prompts that follow while it decodes."""
    prompt = varied_prompt(40, 1)
    others = [prompt[:length] + varied_prompt(9, length) for length in (21, 30, 5)]
    _, plans = serve(directory, layout, [prompt, *others], num_blocks=20, budget=32, max_tokens=12)
    assert sum(len(plan.copies) for plan in plans) >= 2


def recycled(directory):
    prompts = [varied_prompt(20 + i, i) for i in range(4)]
    _, plans = serve(directory, COMPILED, prompts, num_blocks=5, budget=32)
    given = [block for plan in plans for row in plan.rows for block in row.new_block_ids]
    assert len(given) > len(set(given))


def behind_windows(directory):
    """Blocks that one layer group gives back while steps run, another one's layers write at once."""
    prompts = [varied_prompt(length, length) for length in (70, 60, 50)]
    _, plans = serve(directory, COMPILED, prompts, num_blocks=12, budget=24, max_tokens=20)
    given = [block for plan in plans for row in plan.rows for block in row.new_block_ids]
    assert len(given) > 2 * len(set(given))


def preempted(directory):
    prompts = [varied_prompt(12, 1), varied_prompt(13, 2)]
    scheduler, _ = serve(directory, COMPILED_ROWS, prompts, num_blocks=4, max_tokens=30)
    assert scheduler.num_preemptions


def mlx_lm_generate(directory):
    model, _ = load_model(directory)
    cache = make_paged_cache(model, max_tokens=64)
    for chunk in (2048, 17):
        prompt = varied_prompt(21, chunk)
        mlx_lm.generate(model, tokenizer(), prompt, max_tokens=4, prompt_cache=cache, prefill_step_size=chunk)
    assert cache[0].offset == 2 * (21 + 4)


def mlx_lm_generate_trimmed(directory):
    model, _ = load_model(directory)
    cache = make_paged_cache(model, max_tokens=128)
    feed(model, cache, 45, chunk=17)
    trim_prompt_cache(cache, 20)
    feed(model, cache, 30)
    drafts = make_paged_cache(load_model(directory)[0], max_tokens=128)
    prompt = mx.array(varied_prompt(9, 9))
    for _ in speculative_generate_step(prompt, model, model, max_tokens=6, prompt_cache=cache + drafts):
        pass


def copy_on_write(directory):
    model, _ = load_model(directory)
    cache = make_paged_cache(model, max_tokens=128)
    feed(model, cache, 21)
    fork = copy.deepcopy(cache)
    for _ in range(3):
        feed(model, cache, 1)
        feed(model, fork, 2)


def copies_dropped(directory):
    """What one copy copied and read, another one's blocks take the place of."""
    model, _ = load_model(directory)
    cache = make_paged_cache(model, max_tokens=80)
    feed(model, cache, 21)
    for i in range(4):
        fork = copy.deepcopy(cache)
        feed(model, fork, 18 + i)


PROGRAMS = [
    (decode, "llama"),
    (decode, "gemma3"),
    (mixed, "llama"),
    (mixed, "gemma3"),
    (mixed_and_packed, "llama"),
    (shared_in_one_step, "llama"),
    (shared_in_one_step_and_packed, "llama"),
    (parted_within_a_block, "llama"),
    (recycled, "llama"),
    (recycled, "gemma3"),
    (behind_windows, "gemma3"),
    (preempted, "llama"),
    (mlx_lm_generate, "llama"),
    (mlx_lm_generate_trimmed, "llama"),
    (copy_on_write, "llama"),
    (copy_on_write, "gemma3"),
    (copies_dropped, "llama"),
]


@pytest.fixture
def record(tiny_model, monkeypatch):
    """What a program dispatches."""
    # Kernels that compute nothing do not compute what mlx-lm computes.
    monkeypatch.setattr(paged_cache, "_error", lambda *_: 0.0)
    monkeypatch.setitem(sys.modules, "numba", None)

    def record(program, model="llama"):
        with recording() as dispatches:
            program(tiny_model(model))
        return dispatches

    return record


@pytest.mark.parametrize(("program", "model"), PROGRAMS)
def test_accesses_never_overlap_and_every_token_left_out_is_found(record, program, model):
    dispatches = record(program, model)
    assert hazards(dispatches) == []
    silent, tried = unnoticed(dispatches)
    assert silent == []
    assert tried > 10


# ---- Places that forget to hand a token on


def a_compiled_step(monkeypatch):
    monkeypatch.setattr(compiled_step, "_tiny", lambda token: mx.zeros((1,)))


def before(monkeypatch, method):
    """The tokens of all that was stated before are lost."""
    stated = getattr(ModelRunner, method)

    def forgetful(self, *args):
        self._pool.order.token = no_token()
        return stated(self, *args)

    monkeypatch.setattr(ModelRunner, method, forgetful)


def between_steps(monkeypatch):
    before(monkeypatch, "forward")


def between_forwards(monkeypatch):
    before(monkeypatch, "_forward")


def operation(name, *, takes):
    """A layer's operation takes no token, or leaves none."""

    def plant(monkeypatch):
        stated = getattr(KernelLayer, name)

        def forgetful(self, *args):
            token = self.order.token
            if takes:
                self.order.token = no_token()
            result = stated(self, *args)
            if not takes:
                self.order.token = token
            return result

        monkeypatch.setattr(KernelLayer, name, forgetful)

    plant.__name__ = f"{name} {'takes' if takes else 'leaves'} none"
    return plant


PLANTED = [
    (a_compiled_step, decode),
    (between_steps, decode),
    (between_steps, mixed),
    (between_steps, recycled),
    (between_steps, preempted),
    (between_forwards, mixed),
    (between_forwards, shared_in_one_step),
    *((operation(name, takes=True), decode) for name in ("write", "attend_in_place")),
    (operation("write", takes=False), decode),
    (operation("attend_in_place", takes=True), shared_in_one_step_and_packed),
    (operation("gather", takes=True), mixed),
    (operation("attend_in_place", takes=False), recycled),
    (operation("attend_in_place", takes=False), preempted),
    *((operation(name, takes=True), mlx_lm_generate) for name in ("write", "attend_in_place", "gather")),
    (operation("write", takes=False), mlx_lm_generate),
    *((operation(name, takes=False), mlx_lm_generate_trimmed) for name in ("attend_in_place", "gather")),
    *((operation("copy", takes=takes), copy_on_write) for takes in (True, False)),
    (operation("copy", takes=True), copies_dropped),
    (operation("attend_in_place", takes=False), copies_dropped),
]


@pytest.mark.parametrize(("plant", "program"), PLANTED)
def test_a_place_that_forgets_the_token_is_found(record, monkeypatch, plant, program):
    plant(monkeypatch)
    assert hazards(record(program))
