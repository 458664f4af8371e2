import pytest

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.free_queue import FreeBlockQueue


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue.get_all()]


def test_the_published_sequence_of_queue_operations() -> None:
    blocks = [Block(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    assert queue.popleft() is blocks[0]
    queue.remove(blocks[2])
    queue.append(blocks[2])
    assert ids(queue) == [1, 3, 4, 2]
    assert [queue.popleft().block_id for _ in range(4)] == [1, 3, 4, 2]
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()


def test_what_is_prepended_comes_first_in_its_own_order() -> None:
    blocks = [Block(i) for i in range(6)]
    queue = FreeBlockQueue(blocks[:1])
    queue.prepend_n(blocks[4:])
    queue.prepend_n(blocks[1:3])
    assert [block.block_id for block in queue.popleft_n(5)] == [1, 2, 4, 5, 0]
    assert queue.num_free == 0


def test_appending_many_keeps_their_order() -> None:
    blocks = [Block(i) for i in range(4)]
    queue = FreeBlockQueue([])
    queue.append_n(blocks[:2])
    queue.append_n([])
    queue.append_n(blocks[2:])
    assert ids(queue) == [0, 1, 2, 3]
    assert queue.num_free == 4


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    queue = FreeBlockQueue([Block(0)])
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(Block(1))
    taken = queue.popleft()
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(taken)


def test_a_free_block_cannot_be_appended_again() -> None:
    blocks = [Block(0), Block(1)]
    queue = FreeBlockQueue(blocks)
    with pytest.raises(AssertionError):
        queue.append(blocks[0])
