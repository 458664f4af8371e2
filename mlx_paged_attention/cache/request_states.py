"""RequestStates: recurrent layers' states of the requests, and of the prefixes that they leave behind."""

from collections.abc import Iterable

from mlx_paged_attention.cache.prefix_hit import CachedRequest, PrefixHit
from mlx_paged_attention.cache.state_slots import StateSlots


class RequestStates:
    """States beside block tables. For a model without recurrent layers there are none, and nothing happens.

    Args:
        slots: where they are; ``None`` for such a model.
        enable_caching: others are to go on from them.
    """

    def __init__(self, slots: StateSlots | None, block_size: int, *, enable_caching: bool) -> None:
        self._slots = slots
        self._block_size = block_size
        self._enable_caching = enable_caching

    @property
    def are_kept(self) -> bool:
        """The model has recurrent layers."""
        return self._slots is not None

    def find(self, hashes: list[bytes]) -> PrefixHit:
        """How far a request gets whose published blocks have these hashes, without their ids."""
        assert self._slots is not None
        count, slot = self._slots.find(hashes)
        size = self._block_size
        return PrefixHit(num_tokens=count * size, state_slot=slot, num_found=len(hashes) * size)

    def admit(self, request_id: str, hit: PrefixHit) -> None:
        """A request enters, and goes on from what was found."""
        if self._slots is not None:
            self._slots.admit(request_id, hit.state_slot, hit.num_found)

    def free(self, request_id: str) -> None:
        """A request leaves."""
        if self._slots is not None:
            self._slots.free(request_id)

    def chunk_end(self, request: CachedRequest, start: int, end: int, hit: PrefixHit | None = None) -> int:
        """Where a chunk planned for positions ``start .. end - 1`` should end, at most at ``end``.

        States must be kept at the ends of blocks if others are to go on from them.

        Args:
            hit: of a request that is not admitted yet.
        """
        if self._slots is None or not self._enable_caching:
            return end
        branch = None if hit is None else hit.num_found
        return self._slots.cut(request.request_id, start, end, len(request.token_ids), branch)

    def snapshot_is_coming(
        self, request: CachedRequest, hit: PrefixHit, running: Iterable[CachedRequest]
    ) -> bool:
        """Whether a running request is on its way to a snapshot that lets this one skip more than ``hit``."""
        size = self._block_size
        found = set(request.block_hashes[hit.num_tokens // size : hit.num_found // size])
        for other in running if found else ():
            blocks = (len(other.token_ids) - 1) // size
            if other.num_computed_tokens < blocks * size and other.block_hashes[blocks - 1] in found:
                return True
        return False

    def plan(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """The slots that the request's step up to ``num_tokens`` reads its state from and writes it to.

        0 and 0 without states.
        """
        return (0, 0) if self._slots is None else self._slots.plan(request_id, num_tokens)

    def publish(self, request: CachedRequest, num_tokens: int, slot: int) -> None:
        """Make the request's state after ``num_tokens``, now in ``slot``, findable, if that can be done."""
        if self._slots is None or not self._enable_caching or num_tokens % self._block_size:
            return
        block_hash = request.block_hashes[num_tokens // self._block_size - 1]
        generated = num_tokens > request.num_prompt_tokens
        self._slots.publish(request.request_id, slot, num_tokens, block_hash, generated=generated)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make the snapshots of these prefixes unfindable."""
        if self._slots is not None:
            self._slots.forget(hashes)

    def reset(self) -> None:
        """Forget every snapshot; no request may hold one."""
        if self._slots is not None:
            self._slots.reset()

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        if self._slots is not None:
            self._slots.check()
