"""Blocks of equal contents are folded into the older one, once both are sure to be written."""

from fake_runner import FakeRunner, expected_output, make_manager, make_request, varied_prompt

from mlx_paged_attention.scheduler.scheduler import Scheduler

PROMPT = varied_prompt(33, 1)


def make_scheduler(**options):
    manager = make_manager(40, 4, fold_duplicates=True, partial_hits=True, **options)
    return Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=80), FakeRunner(4)


def step(scheduler, runner):
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    scheduler.manager.check()
    return plan


def test_a_prompt_that_had_to_be_computed_again_is_kept_once():
    scheduler, runner = make_scheduler()
    first = make_request("first", PROMPT, max_tokens=9)
    scheduler.add_request(first)
    step(scheduler, runner)
    # Log-probabilities of a prompt come from computing it, whatever is cached.
    second = make_request("second", PROMPT, max_tokens=9, prompt_logprobs=1)
    scheduler.add_request(second)
    step(scheduler, runner)
    manager = scheduler.manager
    assert set(manager.block_ids("first")).isdisjoint(manager.block_ids("second"))
    plan = step(scheduler, runner)
    assert manager.block_ids("first")[:8] == manager.block_ids("second")[:8]
    assert [(change.request_id, change.index) for change in plan.changes] == [("second", i) for i in range(8)]
    assert manager.num_usable_blocks - manager.num_free_blocks <= 8 + 2 * 2
    while scheduler.has_unfinished_requests:
        step(scheduler, runner)
    assert second.output_token_ids == first.output_token_ids == expected_output(PROMPT, 9)


def test_answers_that_agree_share_what_they_have_said():
    scheduler, runner = make_scheduler()
    for name in "abcd":
        scheduler.add_request(make_request(name, PROMPT[:5], max_tokens=40))
    most = 0
    while scheduler.has_unfinished_requests:
        step(scheduler, runner)
        manager = scheduler.manager
        most = max(most, manager.num_usable_blocks - manager.num_free_blocks)
    # Each has the block that it writes, and one that the others have not published yet, to itself.
    assert most <= -(-45 // 4) + 4 * 2


def test_without_caching_nothing_is_compared():
    scheduler, runner = make_scheduler(enable_caching=False)
    for name in "ab":
        scheduler.add_request(make_request(name, PROMPT, max_tokens=5))
    while scheduler.has_unfinished_requests:
        assert step(scheduler, runner).changes == []


def test_a_block_that_was_evicted_and_is_being_written_anew_is_not_taken():
    scheduler, runner = make_scheduler()
    manager = scheduler.manager
    first = make_request("first", PROMPT[:8], max_tokens=30)
    second = make_request("second", PROMPT[:8], max_tokens=30, prompt_logprobs=1)
    scheduler.add_request(first)
    step(scheduler, runner)
    scheduler.add_request(second)
    step(scheduler, runner)
    scheduler.abort(["first"])
    manager.pool.unpublish(manager.block_ids("second")[:1])
    step(scheduler, runner)
    while scheduler.has_unfinished_requests:
        step(scheduler, runner)
    assert second.output_token_ids == expected_output(PROMPT[:8], 30)


def test_a_block_that_nobody_holds_is_not_taken_in_the_place_of_one_that_two_hold():
    scheduler = Scheduler(
        make_manager(5, 4, fold_duplicates=True), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16
    )
    runner, prompt = FakeRunner(4), PROMPT[:8]
    scheduler.add_request(make_request("before", prompt, max_tokens=1))
    step(scheduler, runner)
    first = make_request("first", prompt, max_tokens=4, prompt_logprobs=1)
    second = make_request("second", prompt, max_tokens=4)
    scheduler.add_request(first)
    scheduler.fork(first, second, 8)
    while scheduler.has_unfinished_requests:
        step(scheduler, runner)
    assert first.output_token_ids == second.output_token_ids == expected_output(prompt, 4)
