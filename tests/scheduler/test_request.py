import pytest
from fake_runner import make_manager, make_request

from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.stop import check_stop


def test_a_request_knows_its_prompt_and_output() -> None:
    request = make_request("r", [1, 2, 3])
    request.append_token(4)
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.output_token_ids == [4]
    assert request.num_tokens == 4
    assert request.num_output_tokens == 1


def test_each_full_block_is_hashed_once_as_the_request_grows() -> None:
    hasher = make_manager(2, 4).hasher
    request = make_request("r", [1, 2, 3])
    request.start_hashing(hasher)
    assert request.block_hashes == []
    request.append_token(4)
    (first,) = request.block_hashes
    for token in range(4):
        request.append_token(token)
    assert request.block_hashes[0] is first
    assert len(request.block_hashes) == 2


def test_the_finish_reason_follows_from_the_status() -> None:
    for status, reason in (
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ):
        request = make_request("r", [1])
        assert request.finish_reason is None
        assert not request.is_finished
        request.finish(status)
        assert request.finish_reason == reason
        assert request.is_finished


def test_only_a_running_request_can_be_preempted_and_none_ends_twice() -> None:
    request = make_request("r", [1])
    with pytest.raises(AssertionError):
        request.preempt()
    request.admit(0)
    with pytest.raises(AssertionError):
        request.admit(0)
    request.preempt()
    request.finish(RequestStatus.FINISHED_ABORTED)
    with pytest.raises(AssertionError):
        request.finish(RequestStatus.FINISHED_STOPPED)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    request = make_request("r", [1] * 20)
    request.admit(16)
    request.preempt()
    request.admit(0)
    assert request.num_cached_tokens == 16
    assert request.num_preemptions == 1


def test_empty_prompts_and_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        make_request("r", [])
    with pytest.raises(ValueError, match="max_tokens 0"):
        make_request("r", [1], max_tokens=0)


def ended(
    request: Request, *tokens: int, max_model_len: int = 100
) -> tuple[RequestStatus, int | None] | None:
    result = None
    for token in tokens:
        assert result is None
        request.append_token(token)
        result = check_stop(request, max_model_len)
    return result


STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH


def test_end_of_sequence_on_the_last_allowed_token_is_a_stop() -> None:
    request = make_request("r", [1], max_tokens=2, eos_token_ids=[9])
    assert ended(request, 5, 9) == (STOPPED, None)


def test_any_end_of_sequence_id_stops() -> None:
    for eos in (8, 9):
        assert ended(make_request("r", [1], eos_token_ids=[8, 9]), eos) == (STOPPED, None)


def test_an_ignored_end_of_sequence_still_stops_as_a_stop_token() -> None:
    ignoring = make_request("r", [1], eos_token_ids=[9], ignore_eos=True, max_tokens=3)
    assert ended(ignoring, 9, 9, 9) == (LENGTH, None)
    listed = make_request("r", [1], eos_token_ids=[9], ignore_eos=True, stop_token_ids=[9])
    assert ended(listed, 9) == (STOPPED, 9)


def test_min_tokens_holds_back_stop_tokens() -> None:
    """Vector S6."""
    request = make_request("r", [1], min_tokens=5, eos_token_ids=[9], stop_token_ids=[8])
    assert ended(request, 5, 8, 9) is None
    assert ended(request, 5, 9) == (STOPPED, None)


def test_min_tokens_does_not_hold_back_the_models_length() -> None:
    request = make_request("r", [1], min_tokens=50, max_tokens=60)
    assert ended(request, 5, 5, max_model_len=3) == (LENGTH, None)


def test_known_hashes_are_taken_over_and_hashing_starts_once() -> None:
    hasher = make_manager(2, 4).hasher
    first, second = make_request("a", range(10)), make_request("b", range(10))
    first.start_hashing(hasher)
    second.start_hashing(hasher, first.block_hashes)
    assert second.block_hashes == first.block_hashes
    assert second.block_hashes is not first.block_hashes
    second.start_hashing(make_manager(2, 2).hasher)
    assert len(second.block_hashes) == 2
