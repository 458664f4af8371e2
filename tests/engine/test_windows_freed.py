"""What lies behind windows is given back while requests run, and answers stay those of mlx-lm."""

import pytest
from engine_hooks import check_books, engine_of, poison_free_blocks, settled_stats, wrapped_launch
from oracle import assert_matches, greedy, varied_prompt
from tiny_models import WINDOW

from mlx_paged_attention import LLM
from mlx_paged_attention.api.report import startup_report
from mlx_paged_attention.engine import loading
from mlx_paged_attention.errors import RequestTooLongError
from mlx_paged_attention.runner.layout import LAYOUTS

SIZE = 4
STEP = 16
# Of the window and the steps of two times 16 tokens, which begin and end anywhere in a block.
BOUND = 1 + (WINDOW - 1 + 2 * STEP + SIZE - 2) // SIZE


def small(engine, name="gemma3", **options):
    options = {"block_size": SIZE, "num_blocks": 96, "max_num_batched_tokens": STEP, **options}
    return engine(name, **{"max_num_seqs": 4, "max_model_len": 512, **options})


def held_by_group(llm):
    """Blocks that running requests hold in each group."""
    tables = [engine_of(llm)._cache.tables(r.request_id) for r in engine_of(llm)._scheduler.running]
    return [sum(block_id > 0 for table in group for block_id in table) for group in zip(*tables, strict=True)]


def test_a_windowed_group_holds_no_more_however_long_the_context_grows(engine, oracle):
    llm = small(engine, enable_prefix_caching=False)
    assert llm.info.windows == (None, WINDOW)
    held = []
    with wrapped_launch(llm, lambda _plan: held.append(held_by_group(llm))):
        prompt = varied_prompt(100, 1)
        (output,) = llm.generate([prompt], greedy(60))
    assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 60))
    full, windowed = zip(*held, strict=True)
    assert max(full) == 159 // SIZE + 1
    assert max(windowed) <= BOUND
    # While it decodes: the window, a block that it leaves and one that it enters.
    assert max(windowed[-50:]) <= WINDOW // SIZE + 2


def test_a_context_fits_that_one_table_for_all_layers_had_no_room_for(engine, oracle):
    """55 blocks of two layers' keys and values: 27 blocks of all four would hold 108 tokens."""
    llm = small(engine, num_blocks=56)
    prompt = varied_prompt(150, 2)
    (output,) = llm.generate([prompt], greedy(8))
    assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 8))
    longest = (55 - BOUND) * SIZE
    assert llm.info.longest_sequence == longest
    (output,) = llm.generate([prompt], greedy(longest - 150))
    with pytest.raises(RequestTooLongError, match=f"the pool has 55 \\({longest} tokens\\)"):
        llm.generate([prompt], greedy(longest - 149))


def test_prefixes_are_found_whose_windows_have_moved_on(engine, oracle):
    llm = small(engine)
    salt, prompt = "moved on", varied_prompt(90, 3)
    (first,) = llm.generate([prompt], greedy(30, cache_salt=salt))
    poison_free_blocks(llm)
    answer = first.outputs[0].token_ids
    turns = [prompt, prompt + answer + varied_prompt(9, 4), prompt[:61] + varied_prompt(20, 5)]
    cached = []
    for turn in turns:
        (output,) = llm.generate([turn], greedy(8, cache_salt=salt))
        assert_matches(output.outputs[0], oracle("gemma3").greedy(turn, 8))
        cached.append(output.num_cached_tokens)
    assert cached == [88, 116, 60]
    check_books(llm)
    assert settled_stats(llm).used_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_requests_that_take_blocks_from_each_other(engine, oracle, caching):
    """Preemption in a pool too small for all, with contexts of several windows."""
    llm = small(engine, num_blocks=70, enable_prefix_caching=caching)
    before = settled_stats(llm).preemptions
    prompts = [varied_prompt(length, length) for length in (61, 30, 8, 44)]
    for seed in range(3):
        poison_free_blocks(llm)
        outputs = llm.generate(prompts, greedy(60, n=1, cache_salt=str(seed)))
        for output, prompt in zip(outputs, prompts, strict=True):
            assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 60))
    check_books(llm)
    assert settled_stats(llm).preemptions > before
    assert settled_stats(llm).used_blocks == 0


def test_the_report_tells_what_is_left_of_a_token_behind_windows(engine):
    report = startup_report(small(engine).info)
    assert "1.0 KiB per token (behind windows 512 B), pool 192.0 KiB" in report
    assert "windows are masked" not in report
    assert "behind" not in startup_report(engine("llama").info)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
def test_where_windows_are_only_masked_the_report_says_why(tiny_model, oracle, monkeypatch, layout):
    monkeypatch.setattr(loading, "choose_layout", lambda *args, **options: layout)
    with LLM(model=str(tiny_model("gemma3")), skip_tokenizer_init=True, num_blocks=40) as llm:
        report = startup_report(llm.info)
        (output,) = llm.generate([varied_prompt(50, 6)], greedy(8))
        assert_matches(output.outputs[0], oracle("gemma3").greedy(varied_prompt(50, 6), 8))
    why = "sliding windows are masked, and nothing behind them is freed: the model attends by itself"
    assert (why in report) == layout.dense
    assert llm.info.windows == ((None,) if layout.dense else (None, WINDOW))
