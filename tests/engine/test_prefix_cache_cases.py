"""Reported faults of prefix caching, each as a test that names its report."""

import numpy as np
import pytest
from engine_hooks import between_steps, block_planes, block_pool, kv_layers
from oracle import assert_matches, greedy, varied_prompt
from prefix_hits import hit_length

from mlx_paged_attention import LLM


def test_a_hit_computes_what_a_miss_computes_at_every_length(engine, oracle):
    """tenstorrent/vllm#415: every prompt length from 1 to 65, each twice."""
    llm = engine("llama")
    prompts = [varied_prompt(length, 3) for length in range(1, 66)]
    params = [greedy(8, cache_salt=f"vllm#415-{len(prompt)}") for prompt in prompts]
    misses = llm.generate(prompts, params)
    hits = llm.generate(prompts, params)
    for prompt, miss, hit in zip(prompts, misses, hits, strict=True):
        length = len(prompt)
        assert miss.num_cached_tokens == 0
        assert hit.num_cached_tokens == hit_length(length, computed=length + 7)
        for output in (miss, hit):
            assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 8))


@pytest.mark.parametrize("length", [16, 32, 64])
def test_a_fully_cached_prompt_writes_nothing_into_its_published_blocks(engine, oracle, length):
    """tenstorrent/vllm#415: many hits of the same blocks at once, then once more alone."""
    llm = engine("llama")
    prompt = varied_prompt(length, 4)
    params = greedy(6, cache_salt=f"full-hit-{length}")
    llm.generate([prompt], params)
    before = published_contents(llm)
    for output in llm.generate([prompt] * 6, params) + llm.generate([prompt], params):
        assert output.num_cached_tokens == length - 1
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 6))
    after = published_contents(llm)
    assert len(before) >= length // 16
    for key, contents in before.items():
        assert after.get(key, contents) == contents


def published_contents(llm):
    """The bytes of every published block, by block id and digest."""

    def read():
        blocks = [block for block in block_pool(llm).blocks if block.block_hash is not None]
        planes = [np.array(plane) for layer in kv_layers(llm) for plane in block_planes(layer)]
        return {(b.block_id, b.block_hash): b"".join(p[b.block_id].tobytes() for p in planes) for b in blocks}

    return between_steps(llm, read)


def test_equal_blocks_at_other_places_are_not_hits(engine, oracle):
    """tenstorrent/vllm#415: a block's keys depend on all tokens before it."""
    llm = engine("llama")
    one, two = varied_prompt(16, 1), varied_prompt(16, 2)
    for prompt, cached in (([*one, *two, 3], 0), ([*two, *one, 3], 0), ([*one, *one, *two, 3], 16)):
        (output,) = llm.generate([prompt], greedy(4, cache_salt="elsewhere"))
        assert output.num_cached_tokens == cached
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))


def test_a_block_filled_by_another_continuation_is_not_found_under_the_first(engine, oracle):
    """vllm-project/vllm#49449: the history is rewound by one token at a block's end."""
    llm = engine("llama")
    salt = "vllm#49449"
    prompt = varied_prompt(15, 1)
    (first,) = llm.generate([prompt], greedy(1, cache_salt=salt))
    token = first.outputs[0].token_ids[0]
    other = [*prompt, (token + 1) % 256, *varied_prompt(5, 2)]
    (output,) = llm.generate([other], greedy(4, cache_salt=salt))
    assert_matches(output.outputs[0], oracle("llama").greedy(other, 4))
    back = [*prompt, token]
    for _ in range(2):
        (output,) = llm.generate([back], greedy(1, cache_salt=salt))
        assert_matches(output.outputs[0], oracle("llama").greedy(back, 1))


def test_different_salts_share_nothing(engine, oracle):
    """waybarrios/vllm-mlx#726"""
    llm = engine("llama")
    prompt = [0, 1, 2, 0, *varied_prompt(60, 9)]  # no other test's, since one turn is unsalted
    for salt, cached in (("a", 0), ("b", 0), (None, 0), ("a", 63), ("b", 63), (None, 63)):
        full_salt = salt and f"vllm-mlx#726-{salt}"
        (output,) = llm.generate([prompt], greedy(4, cache_salt=full_salt))
        assert output.num_cached_tokens == cached
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))


def test_a_shared_prefix_of_a_sliding_model_does_not_bleed(engine, oracle):
    """waybarrios/vllm-mlx#775"""
    llm = engine("gemma3")
    shared = varied_prompt(60, 1)
    one, other = shared + varied_prompt(7, 2), shared + varied_prompt(9, 3)
    for prompt in (one, other, other):
        (output,) = llm.generate([prompt], greedy(12, cache_salt="vllm-mlx#775"))
        assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 12))


def test_the_same_prompt_of_a_sliding_model_four_times(engine, oracle):
    """ovg-project/kvcached#446"""
    llm = engine("gemma3", max_num_seqs=1)
    prompt = varied_prompt(93, 4)
    for turn in range(4):
        (output,) = llm.generate([prompt], greedy(24, cache_salt="kvcached#446"))
        assert output.num_cached_tokens == (80 if turn else 0)  # whole blocks, with layer groups
        assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 24))


def test_the_cache_works_in_an_engine_started_after_another_one_closed(tiny_model):
    """jundot/omlx#3183"""
    prompt = varied_prompt(70, 7)
    for _ in range(2):
        with LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=32) as llm:
            cached = [llm.generate([prompt], greedy(2))[0].num_cached_tokens for _ in range(2)]
        assert cached == [0, 64]


def test_the_cache_can_be_switched_off(engine, oracle):
    """waybarrios/vllm-mlx#469"""
    llm = engine("llama", enable_prefix_caching=False)
    prompt = varied_prompt(64, 7)
    for _ in range(2):
        (output,) = llm.generate([prompt], greedy(2))
        assert output.num_cached_tokens == 0
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 2))
    assert llm.stats().cached_blocks == 0


def test_branches_off_a_half_filled_block_leave_it_alone(engine, oracle):
    """NVIDIA/TensorRT-LLM#14876"""
    llm = engine("llama")
    trunk = varied_prompt(24, 1)
    branch = trunk[:20] + varied_prompt(10, 2)
    cached = []
    for prompt in (trunk, branch, trunk):
        (output,) = llm.generate([prompt], greedy(8, cache_salt="TensorRT-LLM#14876"))
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 8))
        cached.append(output.num_cached_tokens)
    # The second finds the first block alone; what it made of the next one begins as the trunk does.
    assert cached == [0, 16, 20]


def test_many_long_prompts_over_one_prefix(engine, oracle):
    """vllm-project/vllm#22808"""
    llm = engine("llama", max_num_seqs=32, max_num_batched_tokens=256, num_blocks=256)
    shared = varied_prompt(512, 1)
    prompts = [shared + varied_prompt(9, s) for s in range(32)]
    outputs = llm.generate(prompts, greedy(16, cache_salt="vllm#22808"))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 16))
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 30


def test_prompt_logprobs_on_a_warm_cache(engine, oracle):
    """vllm-project/vllm#8268"""
    llm = engine("llama")
    salt = "vllm#8268"
    prompt = varied_prompt(32, 1)
    reference = oracle("llama").prompt_logprobs(prompt)
    (plain,) = llm.generate([prompt], greedy(4, cache_salt=salt))
    (scored,) = llm.generate([prompt], greedy(4, cache_salt=salt, prompt_logprobs=1))
    (again,) = llm.generate([prompt], greedy(4, cache_salt=salt))
    assert [o.num_cached_tokens for o in (plain, scored, again)] == [0, 0, 31]
    assert len(scored.prompt_logprobs) == 32
    assert scored.prompt_logprobs[0] is None
    for position, entries in enumerate(scored.prompt_logprobs[1:], start=1):
        assert prompt[position] in entries
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(reference[position - 1][token_id], abs=2e-4)
    for output in (plain, scored, again):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))
