"""Latent attention: where the seam steps in, what it leaves to the model, and what it refuses to guess."""

import copy
import sys
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from oracle import varied_prompt
from order_checker import hazards, recording, unnoticed
from tiny_configs import tiny_row
from tiny_models import build_model

from mlx_paged_attention import make_paged_cache
from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.models.cache_spec import observe_cache
from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.rope_key import RopeKey
from mlx_paged_attention.models.seam import PagedLayerCache, rebind_attention, scaled_dot_product_attention
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.latent_attention import plain_latent_attention
from mlx_paged_attention.runner import paged_cache

LATENT, ROPE, HEADS, BLOCK_SIZE = 16, 8, 4, 8


def generated(model, cache, prompt, count=6, chunk=2048):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_step_size=chunk
    )
    return [token for token, _ in steps]


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "kimi_linear", "longcat_flash"])
def test_a_latent_is_kept_under_its_own_name(name):
    rebind_attention()
    spec = observe_cache(build_model(tiny_row(name))[0], block_size=BLOCK_SIZE)
    assert spec.latents
    assert {tuple(plane.name for plane in layer.planes) for layer in spec.layers} == {("latent", "rope")}


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v2", "minicpm3", "llama"])
def test_models_that_attend_to_something_else_are_not_taken_for_others(name):
    rebind_attention()
    assert not observe_cache(build_model(tiny_row(name))[0], block_size=BLOCK_SIZE).latents


@pytest.mark.parametrize("kind", ["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_generation_forks_and_trimming_equal_mlx_lms(kind, monkeypatch):
    if kind == "gpu":
        skip_without_gpu()
    model, _ = build_model(tiny_row("deepseek_v3"))
    if kind != "cpu":
        monkeypatch.setitem(sys.modules, "numba", None)
    with emulated_kernels() if kind == "emulator" else nullcontext():
        caches = make_prompt_cache(model), make_paged_cache(model, max_tokens=96, block_size=BLOCK_SIZE)
        assert kind == "cpu" or {type(entry.layer) for entry in caches[1]} == {KernelLayer}
        for prompt, chunk in ((varied_prompt(21, 3), 9), (varied_prompt(3, 8), 2048)):
            theirs, ours = (generated(model, cache, prompt, chunk=chunk) for cache in caches)
            assert ours == theirs
        prompt = varied_prompt(2, 9)
        theirs, ours = (generated(model, copy.deepcopy(cache), prompt) for cache in caches)
        assert ours == theirs
        for cache in caches:
            trim_prompt_cache(cache, 5)
        theirs, ours = (generated(model, cache, prompt) for cache in caches)
        assert ours == theirs


def test_single_tokens_gather_nothing_and_all_that_touches_the_pool_is_in_order(monkeypatch):
    # Kernels that compute nothing do not compute what mlx-lm computes.
    monkeypatch.setattr(paged_cache, "_error", lambda *_: 0.0)
    monkeypatch.setitem(sys.modules, "numba", None)
    model, _ = build_model(tiny_row("deepseek_v3"))
    with recording() as dispatches:
        cache = make_paged_cache(model, max_tokens=64, block_size=BLOCK_SIZE)
        mx.eval(model(mx.array([varied_prompt(21, 1)]), cache=cache))
        chunk = len(dispatches)
        for token in varied_prompt(3, 2):
            mx.eval(model(mx.array([[token]]), cache=cache))
    assert "gather_kv" in {dispatch.kernel for dispatch in dispatches[:chunk]}
    assert {dispatch.kernel for dispatch in dispatches[chunk:]} <= {
        "write_kv",
        "latent_decode",
        "merge_splits",
    }
    assert hazards(dispatches) == []
    silent, tried = unnoticed(dispatches)
    assert silent == []
    assert tried > 10


# ---- What stands in for the rope's part


def test_a_product_with_it_gives_the_queries_back():
    queries = mx.ones((2, HEADS, 1, ROPE))
    key = RopeKey()
    product = queries @ key.swapaxes(-1, -2)
    assert product is queries
    assert key.queries_behind(product) is queries


@pytest.mark.parametrize(
    "use",
    [
        lambda q, key: q @ key,
        lambda q, key: mx.matmul(q, key.swapaxes(-1, -2)),
        lambda q, key: key + q,
        lambda q, key: mx.concatenate([q, key], axis=-1),
        lambda q, key: mx.take_along_axis(key, mx.zeros((2, 1, 3, ROPE), mx.int32), axis=2),
        lambda q, key: mx.broadcast_to(key, (2, HEADS, 1, ROPE)),
        lambda q, key: key.swapaxes(0, 1),
        lambda q, key: [q @ key.swapaxes(-1, -2) for _ in "twice"],
    ],
)
def test_whatever_else_is_done_with_it_fails(use):
    with pytest.raises((AssertionError, ValueError, IndexError)):
        use(mx.ones((2, HEADS, 1, ROPE)), RopeKey())


@pytest.mark.parametrize(
    "change", [lambda scores: scores * 2, lambda scores: mx.where(True, scores, 0), lambda _: None]
)
def test_scores_that_a_model_changes_are_refused(change):
    key = RopeKey()
    scores = mx.ones((2, HEADS, 1, ROPE)) @ key.swapaxes(-1, -2)
    with pytest.raises(AssertionError, match="changes the scores"):
        key.queries_behind(change(scores))


# ---- A layer's cache


def latent_cache(context):
    planes = (
        Plane("latent", "float32", (1, BLOCK_SIZE, LATENT)),
        Plane("rope", "float32", (1, BLOCK_SIZE, ROPE)),
    )
    return PagedLayerCache(DeviceLayer(LayerKVSpec(planes), 6), context, dense=False, latent=True)


def batch(start, queries):
    table = np.array([[2, 4, 3]], np.int32)
    at = np.arange(start, start + queries)
    slots = (table[0, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).astype(np.int64)
    return AttentionBatch(np.array([start], np.int32), queries, slots, table, BLOCK_SIZE)


def test_a_run_of_tokens_sees_latents_and_a_mask_and_a_single_one_neither():
    context, rng = ForwardContext(), np.random.default_rng(0)
    cache = latent_cache(context)
    latents, ropes = (
        mx.array(rng.standard_normal((1, 1, 12, dim)).astype(np.float32)) for dim in (LATENT, ROPE)
    )
    context.batch = batch(0, 11)
    assert cache.make_mask(11).shape == (1, 1, 11, 11)
    for got, want in zip(
        cache.update_and_fetch(latents[:, :, :11], ropes[:, :, :11]), (latents, ropes), strict=True
    ):
        np.testing.assert_array_equal(np.array(got), np.array(want[:, :, :11]))
    assert cache.settle()

    context.batch = batch(11, 1)
    assert cache.make_mask(1) is None
    keys, rope_key = cache.update_and_fetch(latents[:, :, 11:], ropes[:, :, 11:])
    q, q_rope = (mx.array(rng.standard_normal((1, HEADS, 1, d)).astype(np.float32)) for d in (LATENT, ROPE))
    scores = q_rope @ rope_key.swapaxes(-1, -2)
    out = scaled_dot_product_attention(q, keys, keys, cache, 0.5, scores)
    assert cache.settle()
    mask = mx.ones((1, 1, 1, 12), mx.bool_)
    expected = plain_latent_attention(q, q_rope, latents, ropes, mask, scale=0.5)
    np.testing.assert_allclose(np.array(out), np.array(expected), atol=1e-6)


def test_latents_that_are_never_attended_to_are_noticed():
    context = ForwardContext()
    cache = latent_cache(context)
    context.batch = batch(0, 1)
    cache.update_and_fetch(mx.zeros((1, 1, 1, LATENT)), mx.zeros((1, 1, 1, ROPE)))
    assert not cache.settle()
