"""What a look into the engine's memory shows, and what it leaves alone."""

import re
import threading
import time

import msgspec
import pytest
from engine_hooks import engine_of, start_together, submit, wrapped_launch
from oracle import greedy, varied_prompt
from scripted_engine import ScriptedEngine

from mlx_paged_attention import LLM
from mlx_paged_attention.cache.block_map import BlockRun
from mlx_paged_attention.engine import blocks_view
from mlx_paged_attention.engine.blocks_view import BlocksView
from mlx_paged_attention.errors import EngineDeadError


def states(view):
    """Every block's state, by id."""
    return [run.state for run in view.runs for _ in range(run.count)]


def test_an_idle_engine_holds_nothing():
    view = ScriptedEngine().engine.blocks()
    assert view.runs == (BlockRun(0, 1, "null"), BlockRun(1, 64, "free"))
    assert (view.requests, view.waste, view.hit_rate, view.copies) == ((), 0.0, 0.0, 0)


def test_requests_are_told_with_what_they_hold():
    scripted = ScriptedEngine(max_num_seqs=2)
    prompt = list(range(1, 11))
    scripted.add("one", prompt)
    scripted.add("two", prompt)
    scripted.add("three", [40, 41])
    scripted.step(2)
    view = scripted.engine.blocks()
    one, two, three = view.requests
    # Two steps: the prompt and a token, of which the second step computed one.
    assert (one.request_id, one.status, one.prompt_tokens, one.output_tokens) == ("one", "running", 10, 2)
    assert (one.computed_tokens, one.cached_tokens, one.blocks, one.empty_slots) == (11, 0, 3, 1)
    assert (two.request_id, two.cached_tokens, two.blocks) == ("two", 8, 3)
    assert (three.request_id, three.status, three.blocks, three.empty_slots) == ("three", "waiting", 0, 0)
    assert 0 <= three.age < 5
    assert view.runs[:4] == (
        BlockRun(0, 1, "null"),
        BlockRun(1, 2, "shared", ("one", "two"), 2),
        BlockRun(3, 1, "used", ("one",), 1),
        BlockRun(4, 1, "used", ("two",), 1),
    )
    assert (view.shared_blocks, view.saved_blocks, view.empty_slots) == (2, 2, 2)
    assert view.waste == pytest.approx(2 / (4 * 4))
    assert (view.hit_rate, view.recent_hit_rate) == (0.4, 0.4)
    scripted.run()


def test_the_map_agrees_with_the_counts_at_every_step():
    scripted = ScriptedEngine(num_blocks=20, max_num_seqs=4)
    for i in range(12):
        scripted.add(f"r{i}", [1 + i % 3, *range(2, 9 + i)], max_tokens=20, n=1 + i % 2)
    while scripted.engine.has_work:
        scripted.step()
        view, stats = scripted.engine.blocks(), scripted.engine.stats()
        told = states(view)
        assert view.stats == stats
        assert len(told) == stats.num_blocks
        assert told.count("free") + told.count("cached") == stats.free_blocks
        assert told.count("cached") == stats.cached_blocks
        assert told.count("used") + told.count("shared") == stats.used_blocks
        assert view.shared_blocks == told.count("shared")
        # References that tables hold: each used block once, and what sharing saves.
        assert sum(one.blocks for one in view.requests) == stats.used_blocks + view.saved_blocks
        owners = {owner for run in view.runs for owner in run.owners}
        assert owners == {one.request_id for one in view.requests if one.blocks}
        assert all(0 <= one.empty_slots < 4 for one in view.requests)
        assert len(view.requests) == stats.running + stats.waiting
    assert stats.preemptions > 0
    assert view.requests == ()


def test_the_recent_hit_rate_forgets_what_the_whole_one_remembers():
    scripted = ScriptedEngine()
    scripted.engine._cache.hit_rate._max_requests = 2
    for i, prompt in enumerate([[1] * 9, [2] * 9, [1] * 9, [2] * 9]):
        scripted.add(f"r{i}", prompt, max_tokens=1)
        scripted.run()
    view = scripted.engine.blocks()
    assert view.hit_rate == pytest.approx(16 / 36)
    assert view.recent_hit_rate == pytest.approx(8 / 9)


def test_copies_of_blocks_are_counted():
    scripted = ScriptedEngine()
    scripted.add("one", list(range(1, 13)))
    scripted.run()
    scripted.add("other", [1, 2, 3, 4, 5, 6, 99, 98])  # parts within the second block
    scripted.run()
    assert scripted.engine.blocks().copies == 1


def test_a_long_queue_is_counted_and_its_head_told(monkeypatch):
    monkeypatch.setattr(blocks_view, "MAX_REQUESTS", 3)
    scripted = ScriptedEngine(max_num_seqs=1)
    for i in range(8):
        scripted.add(f"r{i}", [1, 2, 3])
    scripted.step()
    view = scripted.engine.blocks()
    assert [one.request_id for one in view.requests] == ["r0", "r1", "r2"]
    assert view.requests_left_out == 5


def test_no_token_of_a_prompt_or_an_answer_is_in_it():
    scripted = ScriptedEngine()
    secret = list(range(200, 212))
    scripted.add("one", secret, answer=list(range(220, 228)))
    scripted.step(3)
    text = msgspec.json.encode(scripted.engine.blocks()).decode()
    assert msgspec.json.decode(text, type=BlocksView).stats.running == 1
    assert not {str(token) for token in (*secret, *range(220, 228))} & set(re.findall(r"\d+", text))


def test_looking_from_other_threads_while_requests_run_changes_no_answer(engine, oracle):
    llm = engine("llama", num_blocks=40)
    prompts = [varied_prompt(20, s) for s in range(8)]
    done = threading.Event()
    views = []

    def look():
        while not done.is_set():
            views.append(llm.blocks())

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    outputs = llm.generate(prompts, greedy(24, logprobs=None))
    done.set()
    for watcher in watchers:
        watcher.join()
    assert any(view.stats.running for view in views)
    assert any(view.shared_blocks or view.empty_slots for view in views)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == oracle("llama").greedy(prompt, 24).token_ids


def test_blocks_behind_a_window_are_not_held_any_more(engine):
    llm = engine("gemma3", block_size=4, enable_prefix_caching=False)
    views = []

    def look(_plan):
        views.append(engine_of(llm).blocks())

    with wrapped_launch(llm, look):
        llm.generate([varied_prompt(50, 1)], greedy(30, logprobs=None, ignore_eos=True))
    for view in views:
        (request,) = view.requests
        used = [run for run in view.runs if run.state == "used"]
        assert sum(run.count for run in used) == request.blocks == view.stats.used_blocks
        assert all(run.owners == (request.request_id,) for run in used)
        assert 0 <= request.empty_slots < 4 * request.blocks
    groups = engine_of(llm)._cache.num_groups
    assert groups > 1
    assert views[-1].requests[0].blocks < groups * 20, "80 tokens in each group would be 20 blocks"


def test_a_look_that_fails_is_the_askers_error_and_not_the_engines_end(tiny_model, monkeypatch):
    with LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=32) as llm:
        monkeypatch.setattr(engine_of(llm), "blocks", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.blocks()
        monkeypatch.undo()
        assert llm.generate([varied_prompt(5, 1)], greedy(2))[0].finished
        assert llm.blocks().stats.running == 0
    with pytest.raises(EngineDeadError):
        llm.blocks()


def test_a_look_waits_for_one_step_only(engine):
    llm = engine("llama")
    start_together(llm, 1)

    def slow(plan):
        time.sleep(0.2)

    with wrapped_launch(llm, slow):
        wait = submit(llm, varied_prompt(5, 1), greedy(4))
        begun = time.monotonic()
        view = llm.blocks()
        assert time.monotonic() - begun < 0.5
        assert view.stats.running + view.stats.waiting == 1
        wait()
