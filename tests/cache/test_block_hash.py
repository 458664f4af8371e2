import os
import subprocess
import sys

import pytest

from mlx_paged_attention.cache.block_hash import BlockHasher, hash_block, root_hash

ROOT = root_hash("weights")
FIXED = "17480d8698dea992bd6509342b37e1ee18646d7c3c1de7252193e2e8e4ff61e8"


def chain(tokens: list[int], block_size: int = 4, root: bytes = ROOT, **keys: str) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size, root).extend(hashes, tokens, **keys)
    return hashes


def test_only_full_blocks_are_hashed() -> None:
    assert len(chain(list(range(11)))) == 2


def test_growing_token_by_token_gives_the_same_hashes() -> None:
    hasher, hashes = BlockHasher(4, ROOT), []
    for end in range(1, 18):
        hasher.extend(hashes, list(range(end)), adapter="a", cache_salt="s")
    assert hashes == chain(list(range(17)), adapter="a", cache_salt="s")


def test_a_hash_covers_all_tokens_before_it() -> None:
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_other_weights_give_other_hashes() -> None:
    assert chain([1, 2, 3, 4]) != chain([1, 2, 3, 4], root=root_hash("other weights"))


def test_block_boundaries_are_part_of_the_hash() -> None:
    assert hash_block(ROOT, [1, 2, 3]) != hash_block(ROOT, [1, 2, 3, 0])
    assert hash_block(ROOT, [256]) != hash_block(ROOT, [1, 0])


def test_an_adapter_is_a_key_of_every_block_and_a_salt_of_the_first() -> None:
    tokens = list(range(12))
    salted = chain(tokens, cache_salt="salt1")
    assert salted[0] == hash_block(ROOT, tokens[:4], cache_salt="salt1")
    assert salted[1] == hash_block(salted[0], tokens[4:8])
    adapted = chain(tokens, adapter="name")
    assert adapted[1] == hash_block(adapted[0], tokens[4:8], adapter="name")
    assert set(salted).isdisjoint(chain(tokens))


def test_salt_and_adapter_of_the_same_name_differ() -> None:
    assert hash_block(ROOT, [1], adapter="x") != hash_block(ROOT, [1], cache_salt="x")
    both = hash_block(ROOT, [1], adapter="x", cache_salt="y")
    assert both != hash_block(ROOT, [1], adapter="y", cache_salt="x")


def test_an_empty_salt_is_not_no_salt() -> None:
    assert hash_block(ROOT, [1], cache_salt="") != hash_block(ROOT, [1])


def test_the_format_of_hashes_is_fixed() -> None:
    """A cache on disk outlives the process that wrote it: a change must change root_hash's prefix."""
    assert hash_block(root_hash("w"), [1, 2, 3, 4], adapter="a", cache_salt="s").hex() == FIXED


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_hashes_are_equal_in_other_processes(seed: str) -> None:
    code = (
        "from mlx_paged_attention.cache.block_hash import hash_block, root_hash;"
        "print(hash_block(root_hash('w'), [1, 2, 3, 4], adapter='a', cache_salt='s').hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == FIXED, result.stderr
