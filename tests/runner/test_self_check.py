"""Every model shows at load which layout computes what mlx-lm computes; one that none does is refused."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from step_driver import ALONE, DENSE, PACKED, ROWS, ROWS_ALONE, load_host
from tiny_models import TINY_MODELS, VOCAB_SIZE, WINDOW

from mlx_paged_attention.errors import UnsupportedModelError
from mlx_paged_attention.runner.self_check import choose_layout

# Gemma 2 caps its scores in code of its own, which takes no mask per row.
EXPECTED = {"gemma2": ALONE}


def choose(host, spec, *, on_host=True):
    return choose_layout(host, spec, vocab_size=VOCAB_SIZE, on_host=on_host)


@pytest.fixture
def llama_host(tiny_model):
    """A tiny Llama whose modules a test may break."""
    return load_host(tiny_model("llama"))


def replace_attention(host, kind):
    """Give every layer's attention a class with other behaviour, weights untouched."""
    for layer in host.model.model.layers:
        layer.self_attn.__class__ = kind


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_each_model_gets_the_fastest_layout_that_is_exact(tiny_model, name, on_host):
    host, spec = load_host(tiny_model(name))
    assert choose(host, spec, on_host=on_host) is EXPECTED.get(name, PACKED)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_in_half_precision_is_no_difference(tiny_model, dtype):
    host, spec = load_host(tiny_model("llama"))
    host.model.set_dtype(getattr(mx, dtype))
    half = [replace(s, planes=tuple(replace(p, dtype=dtype) for p in s.planes)) for s in spec.layers]
    assert choose(host, replace(spec, layers=tuple(half)), on_host=False) is PACKED


class ComputesItsOwn(llama.Attention):
    """Softmax written out, as some models do; masks of any kind are honoured."""

    def __call__(self, x, mask=None, cache=None):
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.n_heads, -1).transpose(0, 2, 1, 3)
        k = self.k_proj(x).reshape(batch, length, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(batch, length, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        repeats = self.n_heads // self.n_kv_heads
        k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
        scores = (q * self.scale) @ k.swapaxes(-1, -2)
        if isinstance(mask, str):
            mask = create_causal_mask(length, k.shape[2] - length)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        out = mx.softmax(scores, axis=-1) @ v
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def test_a_model_with_attention_of_its_own_gets_the_dense_gather(llama_host):
    host, spec = llama_host
    replace_attention(host, ComputesItsOwn)
    assert choose(host, spec) is DENSE
    assert choose(host, spec, on_host=False) is DENSE


class OnePositionForAllRows(ComputesItsOwn):
    """Rotates every row by the position of the first, as code for one sequence does."""

    def __call__(self, x, mask=None, cache=None):
        offset = cache.offset
        first = int(offset[0]) if isinstance(offset, mx.array) else offset
        return super().__call__(
            x, mask, SimpleNamespace(offset=first, update_and_fetch=cache.update_and_fetch)
        )


def test_a_model_that_cannot_batch_runs_one_sequence_at_a_time(llama_host):
    host, spec = llama_host
    replace_attention(host, OnePositionForAllRows)
    assert choose(host, spec) is ALONE


class CountsChunksFromZero(llama.Attention):
    """Positions within the chunk instead of the sequence."""

    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, SimpleNamespace(offset=0, update_and_fetch=cache.update_and_fetch))


class IgnoresTheCache(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask)


class DependsOnTheChunk(llama.Attention):
    """Its output depends on how many tokens come together: no cache can make that exact."""

    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) * (1 + 0.05 * x.shape[1])


@pytest.mark.parametrize("kind", [CountsChunksFromZero, IgnoresTheCache, DependsOnTheChunk])
def test_a_model_that_is_exact_in_no_layout_is_refused_with_each_ones_error(llama_host, kind):
    host, spec = llama_host
    replace_attention(host, kind)
    with pytest.raises(UnsupportedModelError, match=r"packed rows: off by .* use mlx_lm for it") as refused:
        choose(host, spec)
    for layout in (PACKED, ROWS, ROWS_ALONE, DENSE, ALONE):
        assert f"{layout.name}: " in str(refused.value)


class WantsANumber(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        if isinstance(cache.offset, mx.array):
            raise TypeError("offset must be an int")
        return super().__call__(x, mask, cache)


def test_a_model_that_takes_no_vector_of_offsets_runs_one_sequence_at_a_time(llama_host):
    host, spec = llama_host
    replace_attention(host, WantsANumber)
    assert choose(host, spec) is ROWS_ALONE
    assert choose(host, spec, on_host=False) is ROWS_ALONE


class RaisesWhenPaged(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        if not isinstance(cache, KVCache):
            raise TypeError("offset must be an int")
        return super().__call__(x, mask, cache)


def test_a_model_that_raises_is_refused_with_what_it_raised(llama_host):
    host, spec = llama_host
    replace_attention(host, RaisesWhenPaged)
    with pytest.raises(UnsupportedModelError, match="packed rows: TypeError: offset must be an int"):
        choose(host, spec)
    # Nothing of it stays behind.
    replace_attention(host, llama.Attention)
    assert choose(host, spec) is PACKED


def test_weights_that_are_no_numbers_are_said_to_be_damaged(llama_host):
    host, spec = llama_host
    host.model.lm_head.weight = mx.full(host.model.lm_head.weight.shape, mx.nan)
    with pytest.raises(UnsupportedModelError, match="mlx_lm itself computes no finite numbers"):
        choose(host, spec)


class NotANumberWhenPaged(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        out = super().__call__(x, mask, cache)
        return out if isinstance(cache, KVCache) else out * mx.nan


def test_numbers_that_are_no_numbers_are_not_taken_for_agreement(llama_host):
    host, spec = llama_host
    replace_attention(host, NotANumberWhenPaged)
    with pytest.raises(UnsupportedModelError, match="off by inf"):
        choose(host, spec)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, None])
def test_a_window_off_by_one_is_noticed(tiny_model, window):
    host, spec = load_host(tiny_model("gemma3"))
    assert {layer.window for layer in spec.layers} == {WINDOW, None}
    wrong = [replace(layer, window=window) if layer.window else layer for layer in spec.layers]
    # With the dense gather the model itself says how long its window is.
    assert choose(host, replace(spec, layers=tuple(wrong))) is DENSE


def test_a_window_where_there_is_none_is_noticed(llama_host):
    host, spec = llama_host
    with pytest.raises(UnsupportedModelError):
        choose(host, replace(spec, layers=(replace(spec.layers[0], window=40), spec.layers[1])))


class SharesKeys(llama.Attention):
    """Attends twice with the same keys, as layers do that share them."""

    def __call__(self, x, mask=None, cache=None):
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.n_heads, -1).transpose(0, 2, 1, 3)
        k = self.k_proj(x).reshape(batch, length, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(batch, length, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        one, other = (
            llama.scaled_dot_product_attention(part, k, v, cache=cache, scale=self.scale, mask=mask)
            for part in (q, q * 0.5)
        )
        return self.o_proj((one + other).transpose(0, 2, 1, 3).reshape(batch, length, -1))


def test_keys_that_are_attended_to_twice_are_found_in_the_pool_twice(llama_host):
    host, spec = llama_host
    replace_attention(host, SharesKeys)
    assert choose(host, spec) is PACKED
    assert choose(host, spec, on_host=False) is PACKED


def test_where_the_model_makes_its_own_masks_only_the_model_may_attend(llama_host):
    host, spec = llama_host
    assert choose(host, replace(spec, own_masks=True)) is DENSE


def test_the_check_leaves_mlx_lm_as_it_was(llama_host, oracle):
    host, spec = llama_host
    choose(host, spec)
    prompt = list(range(3, 40))
    logits = host.model(mx.array([prompt]))
    assert logits.shape == (1, 37, VOCAB_SIZE)
    assert int(logits[0, -1].argmax()) == oracle("llama").greedy(prompt, 1).token_ids[0]
    assert base.scaled_dot_product_attention is not llama.scaled_dot_product_attention
    assert isinstance(host.model.lm_head, nn.Linear)
