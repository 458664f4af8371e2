"""mlx_lm.generate on a paged cache generates what it generates on its own."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model
from oracle import varied_prompt
from test_self_check import ComputesItsOwn
from tiny_models import TINY_MODELS

from mlx_paged_attention import make_paged_cache
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError, UnsupportedModelError
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer

PROMPT = varied_prompt(45, 3)


@pytest.fixture
def llama(tiny_model):
    return load_model(tiny_model("llama"))[0]


def generate(model, cache, prompt=PROMPT, count=12, chunk=2048):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_step_size=chunk
    )
    tokens, logprobs = zip(*steps, strict=True)
    return list(tokens), mx.stack(logprobs)


def assert_same(model, cache, prompt=PROMPT, chunk=2048):
    tokens, logprobs = generate(model, make_prompt_cache(model), prompt, chunk=chunk)
    ours, our_logprobs = generate(model, cache, prompt, chunk=chunk)
    assert ours == tokens
    assert mx.abs(our_logprobs - logprobs).max().item() < 1e-3


@pytest.mark.parametrize("chunk", [2048, 17])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_generation_equals_mlx_lms(tiny_model, name, chunk):
    model, _ = load_model(tiny_model(name))
    cache = make_paged_cache(model, max_tokens=64, block_size=8)
    assert {type(entry.layer) for entry in cache} == {HostLayer}
    assert_same(model, cache, chunk=chunk)
    assert all(entry.offset == len(PROMPT) + 12 for entry in cache)


def test_without_the_compiled_loop_the_pool_is_mlx_arrays(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    cache = make_paged_cache(llama, max_tokens=64)
    assert {type(entry.layer) for entry in cache} == {DeviceLayer}
    assert_same(llama, cache, chunk=17)


def test_half_precision_is_kept(llama):
    llama.set_dtype(mx.bfloat16)
    cache = make_paged_cache(llama, max_tokens=64)
    assert {entry.layer.k.dtype for entry in cache} == {mx.bfloat16}
    assert len(generate(llama, cache)[0]) == 12


@pytest.mark.parametrize("kind", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_kernels_write_what_mlx_lms_prefill_evaluates(llama, monkeypatch, kind):
    """Its prefill evaluates nothing but ``state``: that must run the writes."""
    if kind == "gpu":
        skip_without_gpu()
    monkeypatch.setitem(sys.modules, "numba", None)
    with emulated_kernels() if kind == "emulator" else nullcontext():
        cache = make_paged_cache(llama, max_tokens=64)
        assert {type(entry.layer) for entry in cache} == {KernelLayer}
        assert len({id(entry.layer.order) for entry in cache}) == 1
        assert_same(llama, cache, PROMPT[:40], chunk=17)


def test_saving_is_refused_and_nothing_is_written(llama, tmp_path):
    cache = make_paged_cache(llama, max_tokens=64)
    generate(llama, cache, PROMPT[:20])
    with pytest.raises(ValueError, match="cannot be saved"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    assert not list(tmp_path.iterdir())


def test_a_second_prompt_goes_on_where_the_first_ended(llama):
    caches = make_prompt_cache(llama), make_paged_cache(llama, max_tokens=128)
    for prompt in (PROMPT, varied_prompt(3, 8), varied_prompt(30, 9)):
        theirs, ours = (generate(llama, cache, prompt)[0] for cache in caches)
        assert ours == theirs


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_trimming_forgets_the_last_tokens_alone(tiny_model, name):
    model, _ = load_model(tiny_model(name))
    cache = make_paged_cache(model, max_tokens=128, block_size=8)
    generate(model, cache)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 12 + 20) == 32
    assert [entry.offset for entry in cache] == [len(PROMPT) - 20] * len(cache)
    other = varied_prompt(9, 11)
    expected = generate(model, make_prompt_cache(model), PROMPT[:25] + other)[0]
    assert generate(model, cache, other)[0] == expected
    assert trim_prompt_cache(cache, 10**6) == 25 + 9 + 12
    assert all(entry.empty() for entry in cache)
    assert_same(model, cache)


def test_rejected_drafts_are_rolled_back(llama, tiny_model):
    draft, _ = load_model(tiny_model("qwen2"))
    cache = make_paged_cache(llama, max_tokens=128) + make_paged_cache(draft, max_tokens=128)
    steps = speculative_generate_step(
        mx.array(PROMPT), llama, draft, num_draft_tokens=3, max_tokens=12, prompt_cache=cache
    )
    tokens, _, accepted = zip(*steps, strict=True)
    assert list(tokens) == generate(llama, make_prompt_cache(llama))[0]
    assert not all(accepted)


def test_it_refuses_more_than_it_holds_and_stays_as_it_was(llama):
    cache = make_paged_cache(llama, max_tokens=50)
    with pytest.raises(RequestTooLongError, match="holds 50 tokens, and 51 are needed"):
        generate(llama, cache, chunk=17)
    assert trim_prompt_cache(cache, 50) == 50
    assert_same(llama, cache, PROMPT[:30])


def test_it_refuses_several_sequences_and_no_room(llama):
    cache = make_paged_cache(llama, max_tokens=50)
    with pytest.raises(InvalidRequestError, match="one sequence, not 2"):
        llama(mx.zeros((2, 3), mx.int32), cache=cache)
    for name in ("max_tokens", "block_size"):
        with pytest.raises(InvalidRequestError, match=f"{name} must be at least 1"):
            make_paged_cache(llama, **{name: 0})


def test_a_model_with_attention_of_its_own_gets_its_keys_gathered(llama):
    for layer in llama.model.layers:
        layer.self_attn.__class__ = ComputesItsOwn
    assert_same(llama, make_paged_cache(llama, max_tokens=64), chunk=17)


class LooksAtTheKindOfCache(ComputesItsOwn):
    def __call__(self, x, mask=None, cache=None):
        step = 0 if type(cache).__name__ == "KVCache" else 1
        shifted = SimpleNamespace(offset=cache.offset + step, update_and_fetch=cache.update_and_fetch)
        return super().__call__(x, mask, shifted) * (1 + step)


def test_a_model_that_computes_something_else_is_refused(llama):
    for layer in llama.model.layers:
        layer.self_attn.__class__ = LooksAtTheKindOfCache
    with pytest.raises(UnsupportedModelError, match="use mlx_lm's make_prompt_cache"):
        make_paged_cache(llama)
