"""From a configuration to an engine: what is chosen, and what is said about it."""

import sys

import mlx.core as mx
import pytest
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer

OPTIONS = {"skip_tokenizer_init": True, "num_blocks": 32, "device": "cpu"}


def layer_kinds(llm):
    return {type(layer) for layer in llm._engine._engine._runner._pool.layers}


def test_a_cpu_reads_its_pool_with_the_compiled_loop(tiny_model):
    with LLM(model=str(tiny_model("llama")), **OPTIONS) as llm:
        assert layer_kinds(llm) == {HostLayer}
        assert not any("numba" in note for note in llm.info.notes)


def test_a_cpu_without_numba_is_slower_and_says_so(tiny_model, oracle, monkeypatch):
    """A Mac, or a CUDA machine, that was asked to use its CPU."""
    monkeypatch.setitem(sys.modules, "numba", None)
    prompt = varied_prompt(50, 1)
    with LLM(model=str(tiny_model("gemma3")), **OPTIONS) as llm:
        assert layer_kinds(llm) == {DeviceLayer}
        assert any("numba is not installed" in note for note in llm.info.notes)
        (output,) = llm.generate([prompt], greedy(8))
    assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 8))


def test_what_was_derived_is_what_runs(tiny_model):
    lines = []
    with LLM(model=str(tiny_model("llama")), progress=lines.append, **OPTIONS) as llm:
        info, stats = llm.info, llm.stats()
        pool = llm._engine._engine._runner._pool
        assert (info.num_blocks, info.block_size, info.pool_bytes) == (32, 16, pool.nbytes)
        assert (stats.num_blocks, stats.pool_bytes, stats.free_blocks) == (32, pool.nbytes, 31)
    assert (info.backend, info.dtype, info.forward, info.model) == ("cpu", "float32", "packed rows", "llama")
    assert info.vocab_size == 256
    assert info.max_model_len == 31 * 16
    assert info.full_length_requests == 1
    assert lines[0] == "loading llama"


def test_a_pool_that_no_memory_holds_is_refused_before_the_weights_are_read(tiny_model, monkeypatch):
    monkeypatch.setattr("mlx_paged_attention.engine.loading.load_model", None)
    with pytest.raises(InvalidRequestError, match=r"kv_memory \(10{18}\) asks for a pool of"):
        LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, device="cpu", kv_memory=10**18)


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tiny_model):
    with pytest.raises(InvalidRequestError, match="no GPU back end") as refused:
        LLM(model=str(tiny_model("llama")), **{**OPTIONS, "device": "gpu"})
    assert refused.value.param == "device"
