"""Block: one entry of the block pool's books. The keys and values themselves live in the runner's arrays."""


class Block:
    """A fixed run of slots that holds the keys and values of ``block_size`` tokens.

    Attributes:
        block_id: its index in every layer's pool.
        ref_count: how many requests hold it; 0 means it is in the free queue.
        block_hash: digest under which it is published, ``None`` while it is not.
        prev_free: neighbour in the free queue, ``None`` outside it.
        next_free: the other neighbour.
        is_null: the null block takes writes nobody reads; it is never handed out.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None
        self.is_null = False

    def __repr__(self) -> str:
        published = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={published})"
