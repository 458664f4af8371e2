"""Greedy generation equals mlx-lm's, tokens and log-probabilities, however the engine gets there.

A model of each kind, at length; ``test_model_parity.py`` has every model file, briefly.
"""

import itertools
import os
import subprocess
import sys

import pytest
from engine_hooks import poison_free_blocks, recorded_plans, settled_stats, shuffle_free_blocks
from oracle import assert_matches, greedy, varied_prompt
from prefix_hits import hit_length

from mlx_paged_attention import LLM

MODELS = [
    "llama",
    "llama_llama3_rope",
    "llama_longrope",
    "gemma2",
    "gemma3",
    "qwen3_moe",
]
BLOCK_SIZE = 16
OUTPUTS = 12
PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((33, 1, 16, 50, 5, 17))]
# More new tokens than share a forward with other rows, which starts at 0, in a chunk, and after a hit.
LONG_PROMPT = varied_prompt(110, 6)

_salts = (f"parity-{number}" for number in itertools.count())


@pytest.fixture
def salt():
    """Keeps a test's prefixes to itself, since engines are shared."""
    return next(_salts)


def assert_all_match(outputs, prompts, oracle, num_tokens=OUTPUTS):
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt
        assert_matches(output.outputs[0], oracle.greedy(prompt, num_tokens))
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", MODELS)
def test_each_prompt_alone(engine, oracle, name, salt):
    outputs = [engine(name).generate([prompt], greedy(OUTPUTS, cache_salt=salt))[0] for prompt in PROMPTS]
    assert_all_match(outputs, PROMPTS, oracle(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_batch(engine, oracle, name, salt):
    outputs = engine(name).generate(PROMPTS, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, PROMPTS, oracle(name))


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_chunks(engine, oracle, name, chunk, salt):
    llm = engine(name, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
    before = settled_stats(llm).steps
    outputs = llm.generate(PROMPTS, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, PROMPTS, oracle(name))
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (OUTPUTS - 1)
    assert settled_stats(llm).steps - before >= tokens / chunk


@pytest.mark.parametrize("name", MODELS)
def test_long_chunks_beside_decoding_rows(engine, oracle, name, salt):
    llm = engine(name, max_num_batched_tokens=48, max_num_seqs=4)
    prompts = [*PROMPTS, LONG_PROMPT]
    shuffle_free_blocks(llm, seed=3)
    poison_free_blocks(llm)
    with recorded_plans(llm) as plans:
        outputs = llm.generate(prompts, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, prompts, oracle(name))
    assert any(
        len(plan.rows) > 1 and any(len(row.token_ids) > 40 and row.start > 0 for row in plan.rows)
        for plan in plans
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_long_tail_after_a_hit(engine, oracle, name, salt):
    llm = engine(name)
    shuffle_free_blocks(llm, seed=4)
    poison_free_blocks(llm)
    # Where layers form groups, whole blocks are found.
    hits = (40, 109) if llm.info.windows == (None,) else (32, 96)
    for prompt, cached in ((LONG_PROMPT[:40], 0), (LONG_PROMPT, hits[0]), (LONG_PROMPT, hits[1])):
        (output,) = llm.generate([prompt], greedy(OUTPUTS, cache_salt=salt))
        assert output.num_cached_tokens == cached
        assert_all_match([output], [prompt], oracle(name))


@pytest.mark.parametrize("name", MODELS)
def test_blocks_in_any_physical_order(engine, oracle, name, salt):
    llm = engine(name)
    shuffle_free_blocks(llm, seed=1)
    outputs = llm.generate(PROMPTS, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, PROMPTS, oracle(name))


@pytest.mark.parametrize("name", MODELS)
def test_free_blocks_full_of_nan(engine, oracle, name, salt):
    llm = engine(name)
    shuffle_free_blocks(llm, seed=2)
    poison_free_blocks(llm)
    outputs = llm.generate(PROMPTS, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, PROMPTS, oracle(name))
    # The blocks just written are hit; those beside them are poisoned again.
    poison_free_blocks(llm)
    outputs = llm.generate(PROMPTS, greedy(OUTPUTS, cache_salt=salt))
    assert_all_match(outputs, PROMPTS, oracle(name))
    assert any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_hit(engine, oracle, name, salt):
    llm = engine(name)
    for expect_hit in (False, True):
        for prompt in PROMPTS:
            output = llm.generate([prompt], greedy(OUTPUTS, cache_salt=salt))[0]
            parts = llm.info.windows == (None,)
            found = hit_length(len(prompt), computed=len(prompt) + OUTPUTS - 1, parts=parts)
            assert output.num_cached_tokens == (found if expect_hit else 0)
            assert_all_match([output], [prompt], oracle(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_hits_what_was_generated(engine, oracle, name, salt):
    llm = engine(name)
    history = varied_prompt(20, 7)
    computed = 0
    for turn in range(4):
        output = llm.generate([history], greedy(OUTPUTS, cache_salt=salt))[0]
        assert output.num_cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE
        assert_all_match([output], [history], oracle(name))
        # The last token was sampled, not computed.
        computed = len(history) + OUTPUTS - 1
        history = history + output.outputs[0].token_ids + varied_prompt(9, 20 + turn)


@pytest.mark.parametrize("name", MODELS)
def test_preempted_requests_go_on_as_if_nothing_happened(engine, oracle, name, salt):
    # 27 blocks of 4 hold 108 tokens; the six requests want 122 + 6 * 24. With layer groups, the longest of
    # them takes 38 blocks.
    num_blocks = 40 if name == "gemma3" else 28
    llm = engine(name, block_size=4, num_blocks=num_blocks, max_model_len=96, max_num_batched_tokens=40)
    before = settled_stats(llm).preemptions
    outputs = llm.generate(PROMPTS, greedy(24, cache_salt=salt))
    assert settled_stats(llm).preemptions > before
    assert_all_match(outputs, PROMPTS, oracle(name), 24)
    assert settled_stats(llm).used_blocks == 0


def test_a_ragged_batch_on_several_threads():
    """Tests run on one thread (see conftest.py); here the compiled loops share their work."""
    threads = {"OPENBLAS_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"}
    batch = f"{__file__}::test_a_ragged_batch"
    command = [sys.executable, "-m", "pytest", f"{batch}[llama]", f"{batch}[gemma3]"]
    result = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_grid(tiny_model, oracle, name, enable_prefix_caching, max_num_batched_tokens, block_size):
    """Everything at once: small pools, chunks, shuffled and poisoned blocks, hits, preemption."""
    with LLM(
        model=str(tiny_model(name)),
        skip_tokenizer_init=True,
        block_size=block_size,
        num_blocks=(280 if name == "gemma3" else 200) // block_size + 2,  # the longest alone fits
        max_model_len=128,
        max_num_seqs=min(max_num_batched_tokens, 6),
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        for round_number in range(3):
            shuffle_free_blocks(llm, seed=round_number)
            poison_free_blocks(llm)
            prompts = [*PROMPTS, LONG_PROMPT]
            assert_all_match(llm.generate(prompts, greedy(18)), prompts, oracle(name), 18)
            assert settled_stats(llm).used_blocks == 0
