"""Block hashes: names of block contents that are equal in every process.

A block's keys and values depend on all tokens before it, so its name covers them too: each digest is
taken over the digest of the block before. At 256 bits, equal digests mean equal contents.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256


def root_hash(fingerprint: str) -> bytes:
    """The parent of every sequence's first block.

    Args:
        fingerprint: names all that shapes keys and values besides the tokens: the content of the
            weights and the type they are stored in.
    """
    return sha256(b"mlx-paged-attention/block/1\0" + fingerprint.encode()).digest()


def hash_block(
    parent: bytes,
    token_ids: Sequence[int],
    *,
    adapter: str | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """Digest of one full block.

    Args:
        parent: digest of the block before, or ``root_hash``.
        token_ids: the block's tokens.
        adapter: name of the adapter the block is computed with.
        cache_salt: keeps this block, and so every later one, apart from those of other salts.
    """
    count = len(token_ids)
    parts = [parent, struct.pack(f"<I{count}i", count, *token_ids)]
    for tag, key in ((b"adapter", adapter), (b"salt", cache_salt)):
        if key is not None:
            text = key.encode()
            parts.append(struct.pack(f"<{len(tag)}sI", tag, len(text)) + text)
    return sha256(b"".join(parts)).digest()


class BlockHasher:
    """Extends a sequence's block hashes as it grows.

    Attributes:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int, root: bytes) -> None:
        self.block_size = block_size
        self._root = root

    def start(self, *, adapter: str | None = None, cache_salt: str | None = None) -> bytes:
        """Names what comes before a sequence's first block, as a digest names what comes before the next."""
        return hash_block(self._root, (), adapter=adapter, cache_salt=cache_salt)

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Appends the digest of every full block of ``token_ids`` that has none yet."""
        size = self.block_size
        for index in range(len(block_hashes), len(token_ids) // size):
            block_hashes.append(
                hash_block(
                    block_hashes[-1] if block_hashes else self._root,
                    token_ids[index * size : (index + 1) * size],
                    adapter=adapter,
                    cache_salt=cache_salt if index == 0 else None,
                )
            )
