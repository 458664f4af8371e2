"""Layer groups with windows, step by step: late forks, failed steps."""

from fake_runner import FakeRunner, expected_output, make_manager, make_request

from mlx_paged_attention.scheduler.scheduler import Scheduler


def run(scheduler, runner):
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    scheduler.manager.check()
    return plan


def test_a_late_fork_finds_its_prefix_or_computes_it():
    windows = (None, 4)
    manager = make_manager(60, 2, windows=windows, max_step_tokens=16)
    scheduler = Scheduler(manager, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=60)
    runner = FakeRunner(2, windows)
    parent = make_request("parent", [1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    child = make_request("child", [1, 2, 3, 4, 5, 6, 7], max_tokens=5)
    scheduler.add_request(parent)
    run(scheduler, runner)
    scheduler.fork(parent, child, 7)  # there is no seat for it
    for _ in range(6):
        run(scheduler, runner)
    scheduler.max_num_seqs = 2
    while scheduler.has_unfinished_requests:
        run(scheduler, runner)
    for request in (parent, child):
        assert request.output_token_ids == expected_output([1, 2, 3, 4, 5, 6, 7], request.max_tokens)
    assert manager.usage == 0
    assert child.num_cached_tokens == 6


def test_a_failed_step_ends_nobody_who_only_gave_blocks_back_too():
    """Block 0, which stands for what is behind a window, is in the tables of those that it reaches, too."""
    windows = (None, 4)
    manager = make_manager(60, 2, windows=windows, max_step_tokens=16)
    scheduler = Scheduler(manager, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=60)
    runner = FakeRunner(2, windows)
    other = make_request("other", [9] * 8, max_tokens=20)
    scheduler.add_request(other)
    for _ in range(8):
        run(scheduler, runner)
    assert 0 in manager.tables("other")[1]
    decode = scheduler.schedule()
    first = make_request("first", list(range(1, 13)), max_tokens=5)
    scheduler.add_request(first)
    prompt = scheduler.schedule()
    second = make_request("second", [*range(1, 13), 20], max_tokens=5)
    scheduler.add_request(second)
    built_on_it = scheduler.schedule()
    assert [row.request_id for plan in (prompt, built_on_it) for row in plan.rows] == ["first", "second"]
    assert 0 in manager.tables("second")[1]
    scheduler.update(decode, runner.run(decode))
    runner.fail(prompt)
    assert scheduler.fail_step(prompt) == [first, second]
    runner.fail(built_on_it)
    assert scheduler.fail_step(built_on_it) == []
    manager.check()
    while scheduler.has_unfinished_requests:
        run(scheduler, runner)
    assert other.output_token_ids == expected_output([9] * 8, 20)
    assert manager.usage == 0
