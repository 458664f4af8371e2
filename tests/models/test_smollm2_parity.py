"""The default model, from its own file, computes what mlx-lm alone computes with the same weights."""

import pytest
from engine_hooks import (
    poison_free_blocks,
    preempt_everything,
    settled_stats,
    shuffle_free_blocks,
    wrapped_launch,
)
from oracle import Oracle, assert_matches, greedy

from mlx_paged_attention import LLM
from mlx_paged_attention.models.load import load_model

pytestmark = pytest.mark.model

TEXTS = [
    "The",
    "Question: A farmer has 17 sheep, and all but 9 run away. How many sheep are left?\nAnswer:",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n",
]
OUTPUTS = 5


@pytest.fixture(scope="module")
def llm():
    with LLM(num_blocks=128, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(smollm2_source):
    loaded = load_model(smollm2_source, dtype="auto", device="cpu")
    return Oracle.with_weights_of(loaded.model, loaded.config)


def assert_all_match(outputs, reference, num_tokens=OUTPUTS):
    for output in outputs:
        assert_matches(output.outputs[0], reference.greedy(output.prompt_token_ids, num_tokens))


def params(**others):
    return greedy(OUTPUTS, ignore_eos=True, **others)


def test_texts_of_unequal_length_alone_and_together(llm, reference):
    """Blaizzy/mlx-vlm#1542"""
    together = llm.generate(TEXTS, params(cache_salt="together"))
    alone = [llm.generate(text, params(cache_salt="alone"))[0] for text in TEXTS]
    assert_all_match(together, reference)
    assert_all_match(alone, reference)
    assert [output.prompt for output in together] == TEXTS
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].text == other.outputs[0].text != ""


def test_a_prefix_hit_on_shuffled_and_poisoned_blocks(llm, reference):
    shuffle_free_blocks(llm, seed=3)
    poison_free_blocks(llm)
    cached = []
    for _ in range(2):
        outputs = llm.generate(TEXTS[1:2], params(cache_salt="hit"))
        assert_all_match(outputs, reference)
        cached.append([output.num_cached_tokens for output in outputs])
    assert cached == [[0], [16]]


@pytest.mark.parametrize("chunk", [7] + [pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 16)])
def test_chunks_and_preemption(reference, chunk):
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
    with LLM(block_size=4, num_blocks=64, max_model_len=80, **options) as llm:
        preempted = []

        def preempt(plan):
            if not preempted and any(row.start >= 3 for row in plan.rows):
                preempted.append(plan.step)
                preempt_everything(llm)

        with wrapped_launch(llm, preempt):
            outputs = llm.generate(TEXTS, params())
        assert_all_match(outputs, reference)
        stats = settled_stats(llm)
        assert stats.used_blocks == 0
        assert stats.preemptions > 0
