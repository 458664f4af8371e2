"""Publisher: makes requests' full blocks findable."""

from mlx_paged_attention.cache.block_contents import BlockContents
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.duplicates import Duplicate, fold
from mlx_paged_attention.cache.group_table import GroupTable, RequestTable
from mlx_paged_attention.cache.prefix_hit import CachedRequest
from mlx_paged_attention.cache.prefix_lookup import group_hash


class Publisher:
    """Publishes blocks before they are written, and knows which those are.

    Args:
        contents: learns what is in each published block; ``None`` where nobody asks.
        fold_duplicates: note blocks that are published though others of the same contents are.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, contents: BlockContents | None, *, fold_duplicates: bool
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._contents = contents
        self._fold_duplicates = fold_duplicates
        self._duplicates: dict[str, list[Duplicate]] = {}
        self._published: list[tuple[int, bytes]] = []

    @property
    def unwritten(self) -> set[int]:
        """Ids of the blocks that only the step under construction writes."""
        return {block_id for block_id, _ in self._published}

    def take_published(self) -> list[tuple[int, bytes]]:
        """Block id and digest of each block published since the last call."""
        published, self._published = self._published, []
        return published

    def publish(self, request: CachedRequest, table: RequestTable, num_full: int) -> None:
        """The first ``num_full`` blocks of each group, as far as they are not."""
        if num_full > table.groups[0].num_published:
            for index, group in enumerate(table.groups):
                first = max(group.num_published, group.num_behind)
                group.num_published = num_full
                self._publish_in_group(request, index, group, first, num_full)

    def fold(self, request_id: str) -> list[int]:
        """Give back the request's duplicates that were noted; where its tables have changed."""
        duplicates = self._duplicates.pop(request_id, ())
        return fold(self._pool, duplicates, self.unwritten) if duplicates else []

    def forget(self, request_id: str) -> None:
        """The request leaves: its duplicates are nobody's."""
        self._duplicates.pop(request_id, None)

    def _publish_in_group(
        self, request: CachedRequest, index: int, group: GroupTable, first: int, num_full: int
    ) -> None:
        size = self._block_size
        hashes = [group_hash(key, index) for key in request.block_hashes[first:num_full]]
        done = 0
        while done < len(hashes) and group.blocks[first + done].block_hash is not None:  # by a fork
            assert group.blocks[first + done].block_hash == hashes[done]
            done += 1
        first, hashes = first + done, hashes[done:]
        if not hashes:
            return
        blocks = group.blocks[first:num_full]
        if self._fold_duplicates:
            self._duplicates.setdefault(request.request_id, []).extend(
                Duplicate(group, i, block, key)
                for i, (block, key) in enumerate(zip(blocks, hashes, strict=True), first)
                if self._pool.get_cached_block(key) is not None
            )
        self._pool.publish(
            blocks,
            hashes,
            parent_hash=group_hash(request.block_hashes[first - 1], index) if first else None,
            token_ids=request.token_ids[first * size : num_full * size],
        )
        if self._contents is not None:
            for i, (block, key) in enumerate(zip(blocks, hashes, strict=True), first):
                before = request.block_hashes[i - 1] if i else request.prefix_start
                tokens = request.token_ids[i * size : (i + 1) * size]
                self._contents.add(before, block.block_id, key, tokens)
        self._published += [(block.block_id, key) for block, key in zip(blocks, hashes, strict=True)]
