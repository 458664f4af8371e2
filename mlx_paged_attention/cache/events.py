"""What happened to the published blocks, for those who keep an outside index of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence were published.

    Attributes:
        block_hashes: their digests, in order.
        parent_hash: digest of the block before the first, ``None`` at a sequence's start.
        token_ids: the tokens of all of them, ``block_size`` each.
    """

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last block with this digest is no longer published."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is published any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
