"""What the configuration leaves open is derived from the model and the machine."""

import re

import pytest

from mlx_paged_attention.cache.sizing import PoolPlan, plan_pool
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError

MIB = 1 << 20
GIB = 1 << 30
BYTES_PER_BLOCK = 16 * 1024


def plan(
    *,
    bytes_per_block=BYTES_PER_BLOCK,
    bytes_per_state=0,
    model_max_len=8192,
    free=64 * GIB,
    step=0,
    on_host=False,
    **config,
) -> PoolPlan:
    return plan_pool(
        EngineConfig(**config),
        bytes_per_block=bytes_per_block,
        bytes_per_state=bytes_per_state,
        model_max_len=model_max_len,
        free_memory=free,
        step_memory=step,
        on_host=on_host,
    )


@pytest.mark.parametrize(("on_host", "seqs", "tokens"), [(False, 256, 2048), (True, 64, 256)])
def test_a_cpu_gets_smaller_steps(on_host, seqs, tokens):
    derived = plan(on_host=on_host)
    assert (derived.max_num_seqs, derived.max_num_batched_tokens) == (seqs, tokens)


def test_with_memory_to_spare_every_seat_holds_a_full_length_request():
    derived = plan(max_num_seqs=4, max_model_len=100)
    assert derived.num_blocks == 1 + 4 * 7  # 100 tokens are 7 blocks of 16
    assert derived.full_length_requests == 4
    assert (derived.max_model_len, derived.notes) == (100, [])


def test_by_default_the_pool_may_take_half_of_what_a_step_leaves():
    derived = plan(free=GIB)
    assert derived.num_blocks * BYTES_PER_BLOCK == GIB // 2
    assert plan(free=GIB + 2 * BYTES_PER_BLOCK - 1).num_blocks == derived.num_blocks
    assert plan(free=3 * GIB, step=2 * GIB).num_blocks == derived.num_blocks


def test_a_fraction_is_one_of_what_a_step_leaves():
    derived = plan(free=3 * GIB, step=GIB, kv_memory=0.25)
    assert derived.num_blocks * BYTES_PER_BLOCK == GIB // 2
    assert plan(free=GIB, kv_memory=1.0).num_blocks * BYTES_PER_BLOCK == GIB
    # What is asked for is given, also where it is more than all seats can fill.
    assert plan(free=GIB, kv_memory=0.5, max_num_seqs=1, max_model_len=16).num_blocks == derived.num_blocks
    with pytest.raises(InvalidRequestError, match=r"kv_memory \(0\.001 of 1048576 bytes\)"):
        plan(free=MIB, kv_memory=0.001)


def test_bytes_for_the_pool_leave_a_step_its_own():
    plan(free=65 * BYTES_PER_BLOCK, step=BYTES_PER_BLOCK, kv_memory=64 * BYTES_PER_BLOCK)
    with pytest.raises(InvalidRequestError, match="kv_memory"):
        plan(free=65 * BYTES_PER_BLOCK, step=2 * BYTES_PER_BLOCK, kv_memory=64 * BYTES_PER_BLOCK)


def test_a_pool_begins_with_two_steps_or_an_eighth_and_one_of_given_blocks_with_all():
    assert plan(max_num_batched_tokens=160, max_num_seqs=8).start_blocks == 21
    assert plan(max_num_batched_tokens=160, max_num_seqs=8, kv_memory=80 * BYTES_PER_BLOCK).start_blocks == 10
    assert plan(kv_memory=3 * BYTES_PER_BLOCK).start_blocks == 2
    assert plan(kv_memory=2 * BYTES_PER_BLOCK).start_blocks == 0
    assert plan(num_blocks=77).start_blocks == 0
    assert plan(bytes_per_block=0, bytes_per_state=MIB).start_blocks == 0


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_a_pool_smaller_than_the_context_shortens_it_and_says_so(block_size):
    derived = plan(free=2 * 11 * BYTES_PER_BLOCK, block_size=block_size)
    assert derived.num_blocks == 11
    assert derived.max_model_len == 10 * block_size
    assert derived.full_length_requests == 1
    (note,) = derived.notes
    assert str(10 * block_size) in note
    assert "8192" in note


def test_the_context_that_was_asked_for_is_kept():
    derived = plan(num_blocks=11, max_model_len=320)
    assert derived.max_model_len == 320
    assert derived.full_length_requests == 0.5


def test_blocks_asked_for_are_blocks_given():
    assert plan(num_blocks=77).num_blocks == 77
    assert plan(kv_memory=77 * BYTES_PER_BLOCK + 5).num_blocks == 77


@pytest.mark.parametrize("asked", [{"num_blocks": 65}, {"kv_memory": 65 * BYTES_PER_BLOCK}])
def test_a_pool_larger_than_the_memory_is_refused_by_name(asked):
    (name,) = asked
    with pytest.raises(InvalidRequestError, match=f"{name}.* 1 MiB of memory are free") as refused:
        plan(free=64 * BYTES_PER_BLOCK, **asked)
    assert refused.value.param == name
    assert plan(free=65 * BYTES_PER_BLOCK, **asked).num_blocks == 65


def test_a_budget_for_less_than_a_block_beside_the_null_block_is_refused_with_what_is_needed():
    with pytest.raises(InvalidRequestError, match=str(2 * BYTES_PER_BLOCK)) as refused:
        plan(kv_memory=2 * BYTES_PER_BLOCK - 1)
    assert refused.value.param == "kv_memory"
    assert plan(kv_memory=2 * BYTES_PER_BLOCK).num_blocks == 2


def test_a_machine_without_memory_for_a_pool_is_told_so_in_numbers():
    with pytest.raises(ModelLoadError, match=r"3 MiB are free .* 2\.0 MiB"):
        plan(free=4 * MIB - 1, bytes_per_block=MIB)
    assert plan(free=4 * MIB, bytes_per_block=MIB).num_blocks == 2


def test_weights_that_leave_less_than_nothing_are_the_same_error():
    with pytest.raises(ModelLoadError, match="too little memory"):
        plan(free=-5 * GIB)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(InvalidRequestError, match=r"8193.*8192") as refused:
        plan(max_model_len=8193)
    assert refused.value.param == "max_model_len"
    assert plan(max_model_len=8192).max_model_len == 8192


@pytest.mark.parametrize("on_host", [False, True])
def test_one_given_step_limit_shapes_the_other(on_host):
    few = plan(max_num_batched_tokens=7, on_host=on_host)
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (7, 7)
    many = plan(max_num_seqs=5000, on_host=on_host)
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (5000, 5000)
    both = plan(max_num_seqs=3, max_num_batched_tokens=9, on_host=on_host)
    assert (both.max_num_seqs, both.max_num_batched_tokens) == (3, 9)


# ---- states of recurrent layers


def test_a_request_may_need_two_states_and_half_as_many_again_keep_snapshots():
    derived = plan(bytes_per_state=MIB, max_num_seqs=4)
    assert (derived.num_states, derived.max_num_seqs) == (1 + 12, 4)
    assert plan().num_states == 0


def test_fewer_requests_run_if_their_states_do_not_fit_and_it_is_said():
    derived = plan(bytes_per_state=64 * MIB, free=2 * GIB)
    assert derived.num_states == 1 + 8  # half of a half
    assert derived.max_num_seqs == 4
    assert "max_num_seqs is 4: each request needs two states of 64.0 MiB" in derived.notes
    assert derived.num_blocks * BYTES_PER_BLOCK <= GIB // 2


def test_states_count_towards_a_pool_of_so_many_blocks():
    free = 8 * GIB
    blocks = (free - 12 * 60 * MIB) // BYTES_PER_BLOCK
    plan(bytes_per_state=60 * MIB, num_blocks=blocks, max_num_seqs=4, free=free)
    with pytest.raises(InvalidRequestError, match="num_blocks"):
        plan(bytes_per_state=60 * MIB, num_blocks=blocks + 1, max_num_seqs=4, free=free)


@pytest.mark.parametrize("bytes_per_block", [0, 1000, BYTES_PER_BLOCK, MIB])
@pytest.mark.parametrize("bytes_per_state", [0, 10, 12_345, MIB, 60 * MIB])
@pytest.mark.parametrize("max_num_seqs", [None, 1, 64])
def test_the_memory_that_a_refusal_names_is_enough(bytes_per_block, bytes_per_state, max_num_seqs):
    if not bytes_per_block and not bytes_per_state:
        return
    options = {"bytes_per_block": bytes_per_block, "bytes_per_state": bytes_per_state}
    options |= {"max_num_seqs": max_num_seqs, "free": 1 << 50}
    with pytest.raises(InvalidRequestError) as refused:
        plan(kv_memory=1, **options)
    assert refused.value.param == "kv_memory"
    plan(kv_memory=int(re.search(r"give at least (\d+)", str(refused.value))[1]), **options)


def test_a_machine_without_room_for_two_states_is_too_small():
    with pytest.raises(ModelLoadError, match=r"a request needs two of 60\.0 MiB"):
        plan(bytes_per_state=60 * MIB, free=256 * MIB)
    with pytest.raises(InvalidRequestError, match="lower max_num_seqs to 4 or set kv_memory to at least"):
        plan(bytes_per_state=64 * MIB, free=2 * GIB, max_num_seqs=5)


def test_a_model_without_attention_counts_blocks_and_makes_few():
    derived = plan(bytes_per_block=0, bytes_per_state=MIB, model_max_len=131_072, max_num_seqs=256)
    assert derived.num_blocks == 1 << 16
    assert derived.max_model_len == 131_072
