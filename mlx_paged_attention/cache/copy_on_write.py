"""Copy-on-write: before a request writes into a block that a fork shares, it gets one of its own."""

from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.group_table import RequestTable


def make_writable(pool: BlockPool, table: RequestTable, index: int) -> None:
    """The request is to write into the blocks at ``index``, one of each group, and alone owns them then.

    ``table.changes`` says which are to be copied. There are blocks for that.
    """
    copies = table.changes.copies
    for group in table.groups:
        partial = group.blocks[index]
        if partial.ref_count > 1:
            (own,) = pool.get_new_blocks(1)
            group.blocks[index] = own
            pool.free_blocks([partial])
            copies.append((partial.block_id, own.block_id))
        elif partial.block_hash is not None:  # by the other side of a fork, which is gone
            pool.unpublish([partial.block_id])
    if copies:
        table.changes.indices.append(index)
