"""The published vectors: 16-token blocks, 11 ids of which 10 are usable, a common start of 48 tokens."""

from typing import Any

import pytest
from fake_runner import make_manager, make_request

from mlx_paged_attention.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from mlx_paged_attention.cache.manager import KVCacheManager, PrefixHit
from mlx_paged_attention.scheduler.request import Request

COMMON = [0] * 16 + [1] * 16 + [2] * 16


class Cache:
    """A manager and the few moves of the vectors."""

    def __init__(self, num_blocks: int = 11, block_size: int = 16, **options: Any) -> None:
        self.manager = make_manager(num_blocks, block_size, **options)

    def request(self, request_id: str, tokens: list[int], **options: Any) -> Request:
        request = make_request(request_id, tokens, **options)
        if self.manager.enable_caching:
            request.start_hashing(self.manager.hasher)
        return request

    def admit(self, request_id: str, tokens: list[int], **options: Any) -> tuple[PrefixHit, list[int]]:
        """Looks a prompt up and allocates all of it; returns the hit and the ids after it."""
        request = self.request(request_id, tokens, **options)
        hit = self.manager.get_computed_blocks(request)
        ids = self.manager.allocate_slots(request, len(tokens) - hit.num_tokens, hit)
        assert ids is not None
        assert ids[: len(hit.block_ids)] == list(hit.block_ids)
        self.manager.check()
        return hit, ids[len(hit.block_ids) :]

    def free(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.manager.free(request_id)
            self.manager.check()

    @property
    def queue(self) -> list[int]:
        return [block.block_id for block in self.manager.pool.free_queue.get_all()]

    def refs(self, *block_ids: int) -> list[int]:
        return [self.manager.pool.blocks[i].ref_count for i in block_ids]

    def published(self, *block_ids: int) -> list[bool]:
        return [self.manager.pool.blocks[i].block_hash is not None for i in block_ids]


def test_a_shared_prefix_is_found_kept_and_evicted_in_order() -> None:
    """Vectors P1 to P5."""
    cache = Cache()
    hit, new = cache.admit("req0", COMMON + [3] * 7)
    assert (hit, new) == (PrefixHit(), [1, 2, 3, 4])
    assert cache.published(1, 2, 3, 4) == [True, True, True, False]
    assert cache.refs(1, 2, 3, 4) == [1, 1, 1, 1]

    hit, new = cache.admit("req1", COMMON + [3] * 5)
    assert (hit, new) == (PrefixHit((1, 2, 3), 48), [5])
    assert cache.refs(1, 2, 3) == [2, 2, 2]
    assert cache.manager.num_free_blocks == 5

    cache.free("req0", "req1")
    assert cache.manager.num_free_blocks == 10
    assert cache.queue == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    hit, new = cache.admit("req2", COMMON + [3] * 6)
    assert (hit, new) == (PrefixHit((1, 2, 3), 48), [5])
    assert cache.manager.num_free_blocks == 6
    assert cache.refs(*cache.queue) == [0] * 6

    cache.free("req2")
    hit, new = cache.admit("req3", [99] * 160)
    assert (hit, new) == (PrefixHit(), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])
    assert cache.manager.num_free_blocks == 0


def test_never_published_blocks_go_before_cached_ones() -> None:
    """Vector P6."""
    cache = Cache()
    tokens = list(range(135))
    cache.admit("req0", tokens[:87])
    cache.admit("req1", tokens[87:])
    assert cache.manager.num_free_blocks == 1
    cache.free("req0")
    assert cache.queue == [6, 10, 5, 4, 3, 2, 1]
    cache.free("req1")
    assert cache.queue == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    assert cache.admit("req2", tokens[:35]) == (PrefixHit((1, 2), 32), [6])
    assert cache.manager.num_free_blocks == 7


def test_a_request_for_prompt_logprobs_reads_no_cache_but_fills_it() -> None:
    """Vector P7."""
    cache = Cache()
    cache.admit("req0", COMMON + [3] * 7)
    hit, new = cache.admit("req1", COMMON + [3] * 7, prompt_logprobs=5)
    assert (hit, new) == (PrefixHit(), [5, 6, 7, 8])
    blocks = cache.manager.pool.blocks
    assert [blocks[i].block_hash for i in (5, 6, 7)] == [blocks[i].block_hash for i in (1, 2, 3)]
    assert cache.refs(1, 2, 3, 4, 5, 6, 7, 8) == [1] * 8
    assert cache.manager.stats.queries == 55


def test_decoding_takes_and_publishes_a_block_when_one_is_full() -> None:
    """Vector P8."""
    cache = Cache()
    request = cache.request("req0", COMMON + [3] * 7)
    assert cache.manager.allocate_slots(request, 55) == [1, 2, 3, 4]
    request.num_computed_tokens = 55
    for token in [8] * 4:
        request.append_token(token)
    assert cache.manager.allocate_slots(request, 4) == []
    assert cache.published(4) == [False]
    request.num_computed_tokens = 59
    for token in [9] * 19:
        request.append_token(token)
    assert cache.manager.allocate_slots(request, 19) == [5]
    assert cache.published(4, 5) == [True, False]
    cache.manager.check()


def test_a_reused_block_loses_its_hash() -> None:
    """Vector P9."""
    cache = Cache(2)
    cache.admit("req0", [1] * 16)
    assert cache.published(1) == [True]
    cache.free("req0")
    assert cache.admit("req1", [2] * 15) == (PrefixHit(), [1])
    assert cache.published(1) == [False]


def test_a_hit_block_is_not_evicted_for_the_request_that_hits_it() -> None:
    """Vector P10."""
    cache = Cache(3, full_hit="recompute_block")
    cache.admit("req0", [0] * 16)
    cache.admit("req1", [1] * 16)
    cache.free("req0", "req1")
    assert cache.queue == [1, 2]
    assert cache.admit("req2", [0] * 16 + [1] * 16) == (PrefixHit((1,), 16), [2])


def test_free_blocks_that_are_hit_do_not_count_as_room() -> None:
    """Vector P11."""
    cache = Cache()
    cache.admit("req0", COMMON)
    cache.admit("req1", COMMON * 2)
    cache.free("req1")
    cache.admit("req2", [98] * 32)
    assert cache.manager.num_free_blocks == 5
    request = cache.request("req3", COMMON * 3)
    hit = cache.manager.get_computed_blocks(request)
    assert hit == PrefixHit((1, 2, 3, 4, 5, 6), 96)
    before = cache.queue
    assert cache.manager.allocate_slots(request, 48, hit) is None
    assert cache.refs(1, 2, 3, 4, 5, 6) == [1, 1, 1, 0, 0, 0]
    assert cache.queue == before
    assert cache.manager.block_ids("req3") == []
    cache.manager.check()


def test_without_caching_nothing_is_found() -> None:
    """Vector P12."""
    cache = Cache(5, 4, enable_caching=False)
    assert cache.admit("req0", list(range(10))) == (PrefixHit(), [1, 2, 3])
    cache.free("req0")
    request = cache.request("req1", list(range(16)))
    hit = cache.manager.get_computed_blocks(request)
    assert hit == PrefixHit()
    assert len(cache.manager.allocate_slots(request, 16, hit) or []) == 4
    assert cache.published(1, 2, 3, 4) == [False] * 4
    request.num_computed_tokens = 16
    for token in range(4):
        request.append_token(token)
    assert cache.manager.allocate_slots(request, 4) is None
    assert cache.manager.stats.queries == 0


def test_the_cache_is_reset_only_while_nothing_is_held() -> None:
    """Vector P13."""
    cache = Cache()
    cache.admit("req0", COMMON + [3] * 7)
    assert cache.manager.reset_prefix_cache() is False
    assert cache.published(1) == [True]
    cache.free("req0")
    assert cache.manager.num_cached_blocks == 3
    assert cache.manager.reset_prefix_cache() is True
    assert cache.published(*range(11)) == [False] * 11
    assert cache.manager.num_cached_blocks == 0
    assert cache.admit("req1", COMMON + [3] * 7)[0] == PrefixHit()


def test_only_equal_salts_share_blocks() -> None:
    """Vector P15."""
    cache = Cache()
    cache.admit("req0", COMMON + [3] * 11, cache_salt="salt1")
    cache.free("req0")
    hit, _ = cache.admit("req1", COMMON + [4] * 7, cache_salt="salt1")
    assert hit == PrefixHit((1, 2, 3), 48)
    for salt in ("salt2", None):
        other = cache.request("other", COMMON + [4] * 7, cache_salt=salt)
        assert cache.manager.get_computed_blocks(other) == PrefixHit()
        same = cache.request("same", COMMON, cache_salt="salt1")
        assert set(other.block_hashes).isdisjoint(same.block_hashes)


def test_only_equal_adapters_share_blocks() -> None:
    cache = Cache()
    cache.admit("req0", [*COMMON, 3], adapter="name")
    assert cache.admit("req1", [*COMMON, 4], adapter="name")[0].num_tokens == 48
    assert cache.admit("req2", [*COMMON, 4])[0].num_tokens == 0


@pytest.mark.parametrize("count", [2, 3, 10])
def test_events_tell_what_was_stored_removed_and_cleared(count: int) -> None:
    """Vector P19."""
    cache = Cache(count + 1, enable_events=True)
    manager, tokens = cache.manager, list(range(count * 16))
    first = cache.request("req0", tokens)
    manager.allocate_slots(first, len(tokens))
    assert manager.take_events() == [BlockStored(first.block_hashes, None, tokens, 16)]
    assert manager.take_events() == []

    manager.free("req0")
    manager.allocate_slots(cache.request("req1", tokens), len(tokens))
    removed = [BlockRemoved(block_hash) for block_hash in reversed(first.block_hashes)]
    assert manager.take_events() == [*removed, BlockStored(first.block_hashes, None, tokens, 16)]

    manager.free("req1")
    assert manager.reset_prefix_cache()
    assert manager.take_events()[-1] == AllBlocksCleared()


def test_an_event_names_the_block_before_the_stored_ones() -> None:
    cache = Cache(enable_events=True)
    request = cache.request("req0", list(range(40)))
    cache.manager.allocate_slots(request, 20)
    cache.manager.take_events()
    request.num_computed_tokens = 20
    cache.manager.allocate_slots(request, 20)
    hashes = request.block_hashes
    assert cache.manager.take_events() == [BlockStored(hashes[1:2], hashes[0], list(range(16, 32)), 16)]


def test_a_duplicate_is_reported_removed_only_with_its_last_twin() -> None:
    cache = Cache(enable_events=True)
    cache.admit("req0", [1] * 16)
    cache.admit("req1", [1] * 16, prompt_logprobs=0)
    cache.manager.take_events()
    cache.manager.unpublish([1])
    assert cache.manager.take_events() == []
    cache.manager.unpublish([2])
    assert len(cache.manager.take_events()) == 1


def test_a_wholly_cached_prompt_computes_one_token_and_takes_no_block() -> None:
    cache = Cache()
    cache.admit("req0", COMMON)
    assert cache.admit("req1", COMMON) == (PrefixHit((1, 2, 3), 47), [])
    assert cache.refs(1, 2, 3) == [2, 2, 2]
    recompute = Cache(full_hit="recompute_block")
    recompute.admit("req0", COMMON)
    assert recompute.admit("req1", COMMON) == (PrefixHit((1, 2), 32), [4])


def test_the_token_after_a_wholly_cached_prompt_goes_into_a_new_block() -> None:
    cache = Cache()
    cache.admit("req0", COMMON)
    request = cache.request("req1", COMMON)
    hit = cache.manager.get_computed_blocks(request)
    cache.manager.allocate_slots(request, 1, hit)
    request.num_computed_tokens = 48
    request.append_token(5)
    assert cache.manager.allocate_slots(request, 1) == [4]
    cache.manager.check()


def test_a_hole_in_the_chain_ends_the_hit() -> None:
    cache = Cache()
    cache.admit("req0", [*COMMON, 3])
    cache.manager.unpublish([2])
    assert cache.admit("req1", [*COMMON, 3])[0] == PrefixHit((1,), 16)


def test_the_whole_sequence_must_fit_when_asked() -> None:
    cache = Cache(5, 4)
    request = cache.request("req0", list(range(20)))
    assert cache.manager.allocate_slots(request, 4, whole_sequence=True) is None
    cache.manager.check()
    short = cache.request("req1", list(range(16)))
    assert cache.manager.allocate_slots(short, 4, whole_sequence=True, reserved_blocks=1) is None
    assert cache.manager.allocate_slots(short, 4, whole_sequence=True) == [1]
    assert cache.manager.num_missing_blocks(short) == 3


def test_guessed_tokens_are_never_published_and_can_be_rolled_back() -> None:
    cache = Cache(11, 4)
    request = cache.request("req0", list(range(6)))
    assert cache.manager.allocate_slots(request, 12) == [1, 2, 3]
    assert cache.published(1, 2, 3) == [True, False, False]
    assert cache.manager.rollback("req0", 7) == [3]
    assert cache.manager.block_ids("req0") == [1, 2]
    cache.manager.check()
    assert cache.manager.rollback("req0", 6) == []
    assert cache.manager.rollback("req0", 4) == [2]
    with pytest.raises(ValueError, match="published blocks are final"):
        cache.manager.rollback("req0", 3)
    with pytest.raises(ValueError, match="it has 4 slots"):
        cache.manager.rollback("req0", 5)
    cache.manager.check()


def test_allocating_nothing_is_an_error() -> None:
    cache = Cache()
    with pytest.raises(ValueError, match="at least 1"):
        cache.manager.allocate_slots(cache.request("req0", [1]), 0)


def test_a_request_that_holds_blocks_takes_no_hit() -> None:
    cache = Cache()
    request = cache.request("req0", [1] * 20)
    cache.manager.allocate_slots(request, 4)
    with pytest.raises(ValueError, match="cannot take a prefix hit"):
        cache.manager.allocate_slots(request, 4, PrefixHit())


def test_freeing_what_never_allocated_is_harmless() -> None:
    manager: KVCacheManager = make_manager(3)
    manager.free("unknown")
    manager.check()


@pytest.mark.parametrize("full_hit", ["one_token", "recompute_block"])
def test_the_predicted_need_is_exactly_what_is_taken(full_hit: str) -> None:
    """With one free block fewer than is taken, the same request is refused."""
    for length in range(1, 80):
        spare = {}
        for num_blocks in range(2, 12):
            cache = Cache(num_blocks, full_hit=full_hit)
            warm = cache.request("warm", COMMON[: 16 * min(3, num_blocks - 1)])
            cache.manager.allocate_slots(warm, warm.num_tokens)
            cache.free("warm")
            request = cache.request("req", (COMMON + [3] * 40)[:length])
            hit = cache.manager.get_computed_blocks(request)
            if cache.manager.allocate_slots(request, length - hit.num_tokens, hit) is not None:
                spare[num_blocks] = cache.manager.num_free_blocks
            cache.manager.check()
        assert spare[min(spare)] == 0
        assert list(spare) == list(range(min(spare), 12))
