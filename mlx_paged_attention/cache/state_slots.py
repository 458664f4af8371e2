"""StateSlots: where recurrent layers' states of each sequence are, and which of them others may go on from.

A state is all that a layer remembers of a sequence, whatever its length. Unlike keys and values it
cannot be cut: whoever wants to go on after ``n`` tokens needs the state after exactly ``n``. So the state
after a full block becomes a *snapshot*, found by that block's hash and never written again; its sequence
goes on into another slot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool


@dataclass(slots=True)
class _Place:
    """Where one sequence's state is.

    Attributes:
        current: holds its state once the planned steps have run; ``None`` before its first.
        reading: the snapshot that the last planned step goes on from, held until the next is planned.
        num_tokens: of those steps and all before.
        branch: a position up to which blocks were found but no snapshot: one is to be made there.
        generated: its last snapshot beyond the prompt, which the next one replaces.
    """

    current: Block | None
    reading: Block | None = None
    branch: int = 0
    num_tokens: int = 0
    generated: tuple[Block, bytes] | None = None


class StateSlots:
    """Slots with ids from 1; slot 0 stands for the state before the first token.

    Args:
        num_slots: slot 0 included; a sequence holds at most two, and what is left over
            keeps snapshots.
        block_size: tokens per block: snapshots are made at multiples of it.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.pool = BlockPool(num_slots)
        self._block_size = block_size
        self._places: dict[str, _Place] = {}

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The longest of these prefixes that has a snapshot: its number of blocks, and the slot."""
        for count in range(len(hashes), 0, -1):
            slot = self.pool.get_cached_block(hashes[count - 1])
            if slot is not None:
                return count, slot.block_id
        return 0, 0

    def admit(self, request_id: str, slot: int, branch: int) -> None:
        """A sequence enters, and goes on from this snapshot; from nothing if it is 0.

        Args:
            branch: a position at which a snapshot would have been of use.
        """
        snapshot = self.pool.blocks[slot] if slot else None
        if snapshot is not None:
            self.pool.touch([snapshot])
        self._places[request_id] = _Place(snapshot, branch=branch)

    def cut(self, request_id: str, start: int, end: int, num_tokens: int, branch: int | None) -> int:
        """Where a chunk ``start .. end - 1`` of a sequence's ``num_tokens`` should end, at most at ``end``.

        At a block's end, so that a snapshot can be made: where another sequence has parted from this
        one, and after the last block that is followed by something, for whoever begins with all of it.

        Args:
            branch: as in :meth:`admit`, for a sequence that has not entered yet.
        """
        size = self._block_size
        last = (num_tokens - 1) // size * size
        for stop in (self._places[request_id].branch if branch is None else branch, last):
            if start < stop < end:
                return stop
        aligned = end // size * size
        return aligned if end < num_tokens and aligned > start else end

    def plan(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """The slots that a step up to ``num_tokens`` reads the sequence's state from and writes it to.

        There is always one to write to, if there are two for each sequence.
        """
        place = self._places[request_id]
        place.num_tokens = num_tokens
        if place.reading is not None:
            self.pool.free_blocks([place.reading])
            place.reading = None
        current = place.current
        if current is not None and current.block_hash is None:
            return current.block_id, current.block_id
        (place.current,) = self.pool.get_new_blocks(1)
        place.reading = current
        return 0 if current is None else current.block_id, place.current.block_id

    def publish(
        self, request_id: str, slot: int, num_tokens: int, block_hash: bytes, *, generated: bool
    ) -> None:
        """Make the state after ``num_tokens``, in this slot, a snapshot, now that it has been computed.

        Nothing if there is one like it, or if the sequence has moved on.

        Args:
            generated: it is beyond the prompt: only the sequence's last one of these is kept.
        """
        place = self._places.get(request_id)
        current = place.current if place else None
        if place is None or current is None or current.block_id != slot or place.num_tokens != num_tokens:
            return
        if current.block_hash is not None or self.pool.get_cached_block(block_hash) is not None:
            return
        self.pool.publish([current], [block_hash], parent_hash=None, token_ids=[])
        if generated:
            if place.generated is not None:
                before, its_hash = place.generated
                if before.block_hash == its_hash and before.ref_count == 0:
                    self.pool.retire(before)
            place.generated = current, block_hash

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make the snapshots of these prefixes unfindable, save those that several sequences hold."""
        slots = [self.pool.get_cached_block(block_hash) for block_hash in hashes]
        # What two sequences go on from must stay a snapshot, or both would write to it.
        self.pool.unpublish(slot.block_id for slot in slots if slot is not None and slot.ref_count < 2)

    def free(self, request_id: str) -> None:
        """The sequence leaves; its snapshots can be found until their slots are needed."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self.pool.free_blocks([slot for slot in (place.current, place.reading) if slot is not None])

    def reset(self) -> None:
        """Forget every snapshot; no sequence may hold one."""
        assert self.pool.reset(), "a sequence holds a state"

    def check(self) -> None:
        """Asserts every invariant; O(slots), for tests."""
        self.pool.check()
        owners = dict.fromkeys(range(1, len(self.pool.blocks)), 0)
        for place in self._places.values():
            for slot in (place.current, place.reading):
                if slot is not None:
                    owners[slot.block_id] += 1
            if place.current is not None and place.current.block_hash is None:
                assert place.current.ref_count == 1, "two sequences write to one slot"
        for slot in self.pool.blocks[1:]:
            assert slot.ref_count == owners[slot.block_id], slot
