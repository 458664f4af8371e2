"""KVCacheManager: which blocks each request holds, and which of a prompt's blocks exist already."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from mlx_paged_attention.cache.block_contents import BlockContents
from mlx_paged_attention.cache.block_hash import BlockHasher
from mlx_paged_attention.cache.block_map import HeldTable
from mlx_paged_attention.cache.block_need import BlockNeed
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.copy_on_write import make_writable
from mlx_paged_attention.cache.events import CacheEvent
from mlx_paged_attention.cache.group_table import GroupTable, RequestTable, TableChanges
from mlx_paged_attention.cache.hit_rate import HitRateWindow
from mlx_paged_attention.cache.prefix_hit import CachedRequest, PrefixCacheStats, PrefixHit
from mlx_paged_attention.cache.prefix_lookup import find_prefix, group_hash
from mlx_paged_attention.cache.publisher import Publisher
from mlx_paged_attention.cache.request_states import RequestStates
from mlx_paged_attention.cache.state_slots import StateSlots

FullHit = Literal["one_token", "recompute_block"]


class KVCacheManager:
    """Gives requests block tables out of one pool.

    A request has a table for each layer group, all equally long. Lists of its block ids have one table after
    the other. Blocks wholly behind a group's window are given back, and the null block takes their places.

    Args:
        num_blocks: blocks in the pool at its start, the null block included.
        block_size: tokens per block.
        max_blocks: as many as the pool may grow to; ``None``: it stays as it is.
        enable_caching: publish full blocks and find them again.
        root_hash: parent digest of all first blocks, see ``block_hash.root_hash``.
        full_hit: what a wholly cached prompt computes. ``"one_token"`` computes its last token
            without writing it; ``"recompute_block"`` computes its last block into a new block.
        partial_hits: find prefixes that end within a block, too, which is then copied; not if they
            share less than a quarter of it. Not with windows or several groups.
        fold_duplicates: give a block back where another of the same contents was published before it.
        windows: of each layer group; ``None`` looks back on everything.
        max_step_tokens: most tokens of one request in a step; needed if there are windows.
        states: the slots of recurrent layers' states, for a model that has such layers.
        on_evict: called with block id and digest just before a published block is reused, or taken away.
        enable_events: record ``CacheEvent`` values for ``take_events``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_blocks: int | None = None,
        enable_caching: bool,
        root_hash: bytes,
        full_hit: FullHit = "one_token",
        partial_hits: bool = False,
        fold_duplicates: bool = False,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 0,
        states: StateSlots | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
        enable_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hasher = BlockHasher(block_size, root_hash)
        self.pool = BlockPool(
            num_blocks, max_blocks=max_blocks, on_evict=on_evict, enable_events=enable_events
        )
        self.stats = PrefixCacheStats()
        self.hit_rate = HitRateWindow()
        self.states = RequestStates(states, block_size, enable_caching=enable_caching)
        self.need = BlockNeed(windows, block_size, max_step_tokens)
        self._windows = self.need.windows
        self._windowed = any(window is not None for window in windows)
        if self._windowed and max_step_tokens < 1:
            raise ValueError("windows need max_step_tokens: blocks are held for what a step computes, too")
        simple = self._windows == (None,) and states is None
        self._contents = BlockContents() if partial_hits and simple else None
        self._full_hit = full_hit
        self._tables: dict[str, RequestTable] = {}
        self._publisher = Publisher(self.pool, block_size, self._contents, fold_duplicates=fold_duplicates)

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool has now, the null block included."""
        return self.pool.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that the budget allows, without the null block."""
        return self.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Of those, blocks no request holds, cached ones included."""
        return self.pool.num_usable - self.pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that carry a published prefix."""
        return self.pool.num_cached

    @property
    def usage(self) -> float:
        """Held share of the usable blocks, 0 to 1."""
        return self.pool.usage

    @property
    def num_groups(self) -> int:
        """Layer groups, each with a table of its own."""
        return len(self._windows)

    def num_missing_blocks(self, request: CachedRequest) -> int:
        """Blocks that the request may still take, beyond those it holds, for all the tokens it knows."""
        num_tokens = len(request.token_ids)
        table = self._tables.get(request.request_id)
        return self.need.most(num_tokens) if table is None else table.missing(self.need, num_tokens)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block tables, one group after the other; empty if it holds nothing."""
        return [block_id for ids in self.tables(request_id) for block_id in ids]

    def tables(self, request_id: str) -> list[list[int]]:
        """The request's block table in each group; none if it holds nothing."""
        table = self._tables.get(request_id)
        return [[block.block_id for block in group.blocks] for group in table.groups] if table else []

    def held_tables(self) -> Iterator[HeldTable]:
        """The block tables of each request that holds some, one for each layer group."""
        for request_id, table in self._tables.items():
            for group in table.groups:
                empty = len(group.blocks) * self.block_size - table.num_slots
                yield HeldTable(request_id, group.held, empty)

    def get_computed_blocks(self, request: CachedRequest) -> PrefixHit:
        """The longest published prefix of the request's tokens. Takes nothing."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return PrefixHit()
        num_tokens = len(request.token_ids)
        hashes = request.block_hashes
        if self._full_hit == "recompute_block" or self.states.are_kept:
            hashes = hashes[: (num_tokens - 1) // self.block_size]
        if self._windows != (None,):
            assert not self.states.are_kept, "states and windows"
            tables = find_prefix(self.pool, hashes, self.need, num_tokens)
            ids = tuple(block.block_id for blocks in tables for block in blocks)
            return PrefixHit(ids, min(len(tables[0]) * self.block_size, num_tokens - 1))
        block_ids = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            block_ids.append(block.block_id)
        found = len(block_ids) * self.block_size
        if self._contents is not None and found < num_tokens - 1:
            before = hashes[len(block_ids) - 1] if block_ids else request.prefix_start
            rest = request.token_ids[found : min(found + self.block_size, num_tokens - 1)]
            # What this very step writes cannot be copied before it.
            source, count = self._contents.find(before, rest, self.pool.blocks, self._publisher.unwritten)
            if count < self.block_size // 4:  # less than what the copy costs
                source, count = 0, 0
            return PrefixHit(tuple(block_ids), found + count, source)
        if not self.states.are_kept:
            return PrefixHit(tuple(block_ids), min(found, num_tokens - 1))
        hit = self.states.find(hashes[: len(block_ids)])
        return replace(hit, block_ids=tuple(block_ids[: hit.num_tokens // self.block_size]))

    def estimate_hit(self, request: CachedRequest) -> int:
        """About how many of the request's tokens are cached, found with a few lookups.

        Prefixes lose their last blocks first, so that they have no gaps, as a rule.
        """
        if request.skip_reading_prefix_cache:
            return 0
        find = self.pool.get_cached_block
        # Layers with windows keep the ends of prefixes only.
        group = self._windows.index(None) if None in self._windows else 0
        return self.block_size * bisect_left(
            request.block_hashes, True, key=lambda block_hash: find(group_hash(block_hash, group)) is None
        )

    def allocate_slots(
        self,
        request: CachedRequest,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        whole_sequence: bool = False,
        reserved_blocks: int = 0,
    ) -> list[int] | None:
        """Makes room for the next ``num_new_tokens`` tokens and publishes the blocks they fill.

        The blocks are published before they are written: whoever finds them must run after the
        step that writes them, or later in the same step. Of a block that forks share, and that is to be
        written, the request gets a copy in its place, see :meth:`take_changes`.

        Args:
            hit: what ``get_computed_blocks`` found; only for a request that holds no blocks. The
                new tokens follow it.
            whole_sequence: succeed only if all tokens known now would fit.
            reserved_blocks: free blocks that must be left to others.

        Returns:
            The ids to append to the request's tables, hits first, equally many for each group and one
            group after the other; ``None`` if it does not fit, in which case nothing has changed but that
            blocks behind windows were given back.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, not {num_new_tokens}")
        pool, size = self.pool, self.block_size
        known = self._tables.get(request.request_id)
        if known is not None:
            if hit is not None:
                raise ValueError(f"request {request.request_id} holds blocks and cannot take a prefix hit")
            computed, table = request.num_computed_tokens, known
        else:
            computed = hit.num_tokens if hit is not None else request.num_computed_tokens
            table = self._table_of(hit)
        groups, held = table.groups, len(table.groups[0].blocks)
        num_slots = computed + num_new_tokens
        num_new_blocks = max(0, -(-num_slots // size) - held)
        partial = None if known is None else table.partial_block(computed, num_slots, size)
        # Forks share the blocks of all groups, until one group's is evicted, or folded.
        shared = 0 if partial is None else sum(group.blocks[partial].ref_count > 1 for group in groups)

        if num_new_blocks or known is None or whole_sequence or shared:
            if known is not None and self._windowed:
                processed = max(0, request.num_computed_tokens - request.num_tokens_in_flight)
                pool.free_blocks(table.give_up(self.need, processed, pool.blocks[0]))
            required = num_new_blocks * len(groups)
            if whole_sequence:
                required = max(required, table.missing(self.need, len(request.token_ids)))
            required += shared
            if known is None:
                required += sum(block.ref_count == 0 for block in table.held)
            if required > pool.num_free - reserved_blocks:
                return None

        added = held
        if known is None:
            pool.touch(table.held)
            self._tables[request.request_id] = table
            self.states.admit(request.request_id, hit or PrefixHit())
            # Counted on admission, not on every attempt of a request that waits for room.
            if hit is not None and self.enable_caching and not request.skip_reading_prefix_cache:
                self.stats.record(request, hit)
                if not request.num_preemptions:
                    self.hit_rate.observe(1, len(request.token_ids), hit.num_tokens)
            added = 0
        else:
            table.changes = TableChanges(indices=self._publisher.fold(request.request_id))
        if partial is not None:
            make_writable(pool, table, partial)
        if num_new_blocks:
            new_blocks = pool.get_new_blocks(num_new_blocks * len(groups))
            for i, group in enumerate(groups):
                group.blocks += new_blocks[i * num_new_blocks : (i + 1) * num_new_blocks]
        table.num_slots = num_slots

        # Tokens beyond the known ones are guesses that may be taken back: not published.
        if self.enable_caching:
            self._publisher.publish(request, table, min(num_slots, len(request.token_ids)) // size)
        if added and not num_new_blocks:
            return []
        return [block.block_id for group in groups for block in group.blocks[added:]]

    def num_slots(self, request_id: str) -> int:
        """Tokens that the request has been given room for."""
        return self._tables[request_id].num_slots

    def take_changes(self, request_id: str) -> TableChanges:
        """What the request's last allocation changed; once."""
        table = self._tables[request_id]
        changes, table.changes = table.changes, TableChanges()
        return changes

    def fork(self, request_id: str, child_id: str, num_tokens: int) -> None:
        """Give a new request the blocks of another's first ``num_tokens`` tokens. Nothing is copied.

        Both own them from here on: whoever first writes into one that is partly filled gets a copy of it, and
        the last owner writes in place.
        """
        assert self.can_fork
        assert self.holds_window(request_id, num_tokens - 1), "what the child sees is gone"
        parent = self._tables[request_id]
        assert child_id not in self._tables
        assert 0 < num_tokens <= parent.num_slots, "tokens that have no slots"
        child = self._tables[child_id] = parent.fork(num_tokens, self.block_size)
        self.pool.touch(child.held)

    @property
    def can_fork(self) -> bool:
        """Whether sequences can part at any token: states of recurrent layers are kept at some only."""
        return not self.states.are_kept

    def holds_window(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request still holds all that the token after its first ``num_tokens`` looks at."""
        return self._tables[request_id].holds_window(self.need, num_tokens)

    def rollback(self, request_id: str, num_tokens: int) -> list[int]:
        """Takes back the slots above ``num_tokens`` and frees the blocks that held nothing else.

        Returns:
            The ids freed, to be cut off the ends of the request's tables.

        Raises:
            ValueError: the slots were never given, or lie in a published block, whose contents
                others may be reading; or what the next token sees is gone already.
        """
        table = self._tables[request_id]
        if num_tokens > table.num_slots:
            raise ValueError(f"cannot roll {request_id} back to {num_tokens}: it has {table.num_slots} slots")
        if num_tokens < table.groups[0].num_published * self.block_size:
            raise ValueError(f"cannot roll {request_id} back to {num_tokens}: published blocks are final")
        if not self.holds_window(request_id, num_tokens):
            raise ValueError(f"cannot roll {request_id} back to {num_tokens}: its window is gone")
        keep = -(-num_tokens // self.block_size)
        freed = []
        for group in table.groups:
            cut = group.blocks[keep:]
            del group.blocks[keep:]
            self.pool.free_blocks(reversed(cut))
            freed += [block.block_id for block in cut]
        table.num_slots = num_tokens
        return freed

    def publish_rest(self, request: CachedRequest) -> None:
        """Publishes the last block of a request that is complete, if its tokens fill it.

        Where steps are planned before their tokens are known, no later allocation has done that.
        """
        has_answered = len(request.token_ids) > request.num_prompt_tokens
        if self.enable_caching and has_answered:  # so that all before its last token has been computed
            table = self._tables[request.request_id]
            processed = request.num_computed_tokens - request.num_tokens_in_flight
            num_tokens = min(table.num_slots, processed, len(request.token_ids) - 1)
            self._publisher.publish(request, table, num_tokens // self.block_size)

    def free(self, request_id: str) -> None:
        """Gives the request's blocks back; published ones can be found until they are reused."""
        table = self._tables.pop(request_id, None)
        self._publisher.forget(request_id)
        if table is not None:
            # By position, so that of a prefix for which all groups are needed the end is reused first.
            columns = zip(*(group.blocks for group in table.groups), strict=True)
            blocks = [block for column in columns for block in column]
            self.pool.free_blocks(reversed(blocks))
            self.states.free(request_id)

    def unpublish(self, block_ids: list[int]) -> None:
        """Makes blocks unfindable: their contents were not, or will not be, written as promised."""
        self.pool.unpublish(block_ids)

    def unpublish_from(self, request_id: str, num_tokens: int) -> None:
        """Makes the request's blocks from position ``num_tokens`` on unfindable."""
        first = num_tokens // self.block_size
        for group in self._tables[request_id].groups:
            self.pool.unpublish(block.block_id for block in group.blocks[first:])
            group.num_published = min(group.num_published, first)

    def condemn(self, request: CachedRequest) -> None:
        """Makes all that the request holds unfindable: what is in it is not to be trusted."""
        self.unpublish_from(request.request_id, 0)
        for group, window in enumerate(self._windows):
            if window is not None:  # what lies behind it has been given back, and may still be found
                found = [self.pool.get_cached_block(group_hash(one, group)) for one in request.block_hashes]
                self.pool.unpublish(block.block_id for block in found if block is not None)
        self.states.forget(request.block_hashes)

    def take_published(self) -> list[tuple[int, bytes]]:
        """Block id and digest of each block published since the last call."""
        return self._publisher.take_published()

    def is_published(self, block_id: int, block_hash: bytes) -> bool:
        """Whether this block is published under this digest."""
        blocks = self.pool.blocks
        return block_id < len(blocks) and blocks[block_id].block_hash == block_hash

    def shrink(self, num_blocks: int) -> int:
        """Takes free blocks away, see ``BlockPool.shrink``; how many there are now."""
        before = self.pool.num_blocks
        left = self.pool.shrink(num_blocks)
        if self._contents is not None:
            self._contents.remove(range(left, before))
        return left

    def reset_prefix_cache(self) -> bool:
        """Unpublishes everything; ``False``, and nothing done, while any request holds blocks."""
        done = self.pool.reset()
        if done:
            self.states.reset()
            if self._contents is not None:
                self._contents.clear()
        return done

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        return self.pool.take_events()

    def check(self) -> None:
        """Asserts every invariant of tables and pool; O(blocks), for tests."""
        self.pool.check()
        self.states.check()
        owners = dict.fromkeys(range(1, len(self.pool.blocks)), 0)
        for request_id, table in self._tables.items():
            assert len(table.groups) == self.num_groups
            table.check(request_id, self.block_size)
            for block in table.held:
                owners[block.block_id] += 1
        for block in self.pool.blocks[1:]:
            assert block.ref_count == owners[block.block_id], block

    def _table_of(self, hit: PrefixHit | None) -> RequestTable:
        """What was found; nothing is taken yet."""
        ids = () if hit is None else hit.block_ids
        count = len(ids) // self.num_groups
        groups = []
        for group in range(self.num_groups):
            blocks = [self.pool.blocks[block_id] for block_id in ids[group * count : (group + 1) * count]]
            groups.append(GroupTable(blocks, count, sum(block.is_null for block in blocks)))
        return RequestTable(groups)
