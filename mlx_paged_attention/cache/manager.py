"""KVCacheManager: which blocks each request holds, and which of a prompt's blocks exist already."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_contents import BlockContents
from mlx_paged_attention.cache.block_hash import BlockHasher
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.events import CacheEvent
from mlx_paged_attention.cache.hit_rate import HitRateWindow
from mlx_paged_attention.cache.state_slots import StateSlots

FullHit = Literal["one_token", "recompute_block"]


class CachedRequest(Protocol):
    """What the manager reads of a request; it changes none of it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: list[bytes]
    prefix_start: bytes

    @property
    def skip_reading_prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The published blocks at the start of a request's tokens.

    Attributes:
        block_ids: in table order.
        num_tokens: tokens that need not be computed. One less than the blocks hold if they hold
            the whole sequence: its last token is computed again, for its logits.
        copied_from: a published block that begins with the tokens after those of ``block_ids``: a copy of it
            saves computing them; 0 if there is none.
        state_slot: where the recurrent layers' state after these tokens is; 0 without any.
        num_found: with such layers, tokens in published blocks, also those after the last snapshot.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    copied_from: int = 0
    state_slot: int = 0
    num_found: int = 0


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups of admitted requests, in requests and tokens. ``preempted_*``: those of resumed ones."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """A block of a table that others hold, too, and in whose place its owner got a block of its own.

    Attributes:
        index: in the table.
        source, target: what is to be copied before anything is written.
    """

    index: int
    source: int
    target: int


@dataclass(slots=True)
class _BlockTable:
    """One request's blocks.

    Attributes:
        num_slots: tokens it has room assigned for.
        num_published: leading blocks that were found or made published.
        copied: what the last allocation copied.
        forked: blocks that were not published then are, or were, another's, too.
    """

    blocks: list[Block]
    num_slots: int
    num_published: int
    copied: CopyOnWrite | None = None
    forked: bool = False


class KVCacheManager:
    """Gives requests block tables out of one pool.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens per block.
        enable_caching: publish full blocks and find them again.
        root_hash: parent digest of all first blocks, see ``block_hash.root_hash``.
        full_hit: what a wholly cached prompt computes. ``"one_token"`` computes its last token
            without writing it; ``"recompute_block"`` computes its last block into a new block.
        partial_hits: find prefixes that end within a block, too, which is then copied; not if they
            share less than a quarter of it.
        states: the slots of recurrent layers' states, for a model that has such layers.
        on_evict: called with block id and digest just before a published block is reused.
        enable_events: record ``CacheEvent`` values for ``take_events``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool,
        root_hash: bytes,
        full_hit: FullHit = "one_token",
        partial_hits: bool = False,
        states: StateSlots | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
        enable_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hasher = BlockHasher(block_size, root_hash)
        self.pool = BlockPool(num_blocks, on_evict=on_evict, enable_events=enable_events)
        self.stats = PrefixCacheStats()
        self.hit_rate = HitRateWindow()
        self.num_copies = 0  # blocks copied because forks shared them
        self.states = states
        self._contents = BlockContents() if partial_hits and states is None else None
        self._full_hit = full_hit
        self._tables: dict[str, _BlockTable] = {}
        self._published: list[tuple[int, bytes]] = []

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, cached ones included."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that carry a published prefix."""
        return self.pool.num_cached

    @property
    def usage(self) -> float:
        """Held share of the usable blocks, 0 to 1."""
        return self.pool.usage

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: CachedRequest) -> int:
        """Blocks the request still needs for all the tokens it knows."""
        table = self._tables.get(request.request_id)
        held = len(table.blocks) if table else 0
        return max(0, self.num_blocks_for(len(request.token_ids)) - held)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty if it holds nothing."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table else []

    def get_computed_blocks(self, request: CachedRequest) -> PrefixHit:
        """The longest published prefix of the request's tokens. Takes nothing."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return PrefixHit()
        num_tokens = len(request.token_ids)
        hashes = request.block_hashes
        if self._full_hit == "recompute_block" or self.states is not None:
            hashes = hashes[: (num_tokens - 1) // self.block_size]
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
            unwritten = {block_id for block_id, _ in self._published}
            source, count = self._contents.find(before, rest, self.pool.blocks, unwritten)
            if count < self.block_size // 4:  # less than what the copy costs
                source, count = 0, 0
            return PrefixHit(tuple(block_ids), found + count, source)
        if self.states is None:
            return PrefixHit(tuple(block_ids), min(found, num_tokens - 1))
        count, slot = self.states.find(hashes[: len(block_ids)])
        return PrefixHit(tuple(block_ids[:count]), count * self.block_size, state_slot=slot, num_found=found)

    def estimate_hit(self, request: CachedRequest) -> int:
        """About how many of the request's tokens are cached, found with a few lookups.

        Prefixes lose their last blocks first, so that they have no gaps, as a rule.
        """
        if request.skip_reading_prefix_cache:
            return 0
        find = self.pool.get_cached_block
        hashes = request.block_hashes
        return self.block_size * bisect_left(hashes, True, key=lambda block_hash: find(block_hash) is None)

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
        written, the request gets a copy in its place, see :meth:`take_copied`.

        Args:
            hit: what ``get_computed_blocks`` found; only for a request that holds no blocks. The
                new tokens follow it.
            whole_sequence: succeed only if all tokens known now would fit.
            reserved_blocks: free blocks that must be left to others.

        Returns:
            The ids to append to the request's table, hits first; ``None`` if it does not fit, in
            which case nothing has changed.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, not {num_new_tokens}")
        pool, size = self.pool, self.block_size
        table = self._tables.get(request.request_id)
        if table is not None:
            if hit is not None:
                raise ValueError(f"request {request.request_id} holds blocks and cannot take a prefix hit")
            computed = request.num_computed_tokens
            held = len(table.blocks)
            hit_blocks: list[Block] = []
        else:
            computed = hit.num_tokens if hit is not None else request.num_computed_tokens
            hit_blocks = [pool.blocks[block_id] for block_id in hit.block_ids] if hit is not None else []
            held = len(hit_blocks)
        num_slots = computed + num_new_tokens
        num_new_blocks = max(0, -(-num_slots // size) - held)
        partial = None if table is None else self._partial_block(table, computed, num_slots)
        is_shared = partial is not None and partial.ref_count > 1

        if num_new_blocks or hit_blocks or whole_sequence or is_shared:
            required = num_new_blocks
            if whole_sequence:
                required = max(required, self.num_blocks_for(len(request.token_ids)) - held)
            required += is_shared
            required += sum(block.ref_count == 0 for block in hit_blocks)
            if required > pool.num_free - reserved_blocks:
                return None

        if table is None:
            pool.touch(hit_blocks)
            table = _BlockTable(hit_blocks, 0, len(hit_blocks))
            self._tables[request.request_id] = table
            if self.states is not None:
                hit = hit or PrefixHit()
                self.states.admit(request.request_id, hit.state_slot, hit.num_found)
            if hit is not None:
                self._record_lookup(request, hit)
            added = 0
        else:
            added = held
            table.copied = None
        if partial is not None:
            self._make_writable(table, partial)
        if num_new_blocks:
            table.blocks.extend(pool.get_new_blocks(num_new_blocks))
        table.num_slots = num_slots

        # Tokens beyond the known ones are guesses that may be taken back: not published.
        self._publish(request, table, min(num_slots, len(request.token_ids)) // size)
        return [block.block_id for block in table.blocks[added:]]

    def _partial_block(self, table: _BlockTable, computed: int, num_slots: int) -> Block | None:
        """The block that holds tokens of the table and is now to be written from within, if there is one."""
        begin = max(computed, table.num_slots)  # slots that were given before have been written
        inside = begin % self.block_size and num_slots > begin
        return table.blocks[begin // self.block_size] if inside else None

    def _make_writable(self, table: _BlockTable, partial: Block) -> None:
        if partial.ref_count > 1:
            (own,) = self.pool.get_new_blocks(1)
            index = table.blocks.index(partial)
            table.blocks[index] = own
            self.pool.free_blocks([partial])
            table.copied = CopyOnWrite(index, partial.block_id, own.block_id)
            self.num_copies += 1
        elif partial.block_hash is not None:  # by the other side of a fork, which is gone
            self.pool.unpublish([partial.block_id])

    def num_slots(self, request_id: str) -> int:
        """Tokens that the request has been given room for."""
        return self._tables[request_id].num_slots

    def take_copied(self, request_id: str) -> CopyOnWrite | None:
        """What the request's last allocation copied; once."""
        table = self._tables[request_id]
        copied, table.copied = table.copied, None
        return copied

    def fork(self, request_id: str, child_id: str, num_tokens: int) -> None:
        """Give a new request the blocks of another's first ``num_tokens`` tokens. Nothing is copied.

        Both own them from here on: whoever first writes into one that is partly filled gets a copy of it, and
        the last owner writes in place.
        """
        assert self.can_fork
        parent = self._tables[request_id]
        assert child_id not in self._tables
        assert 0 < num_tokens <= parent.num_slots, "tokens that have no slots"
        blocks = parent.blocks[: self.num_blocks_for(num_tokens)]
        self.pool.touch(blocks)
        published = min(parent.num_published, num_tokens // self.block_size)
        self._tables[child_id] = _BlockTable(blocks, num_tokens, published, forked=True)
        parent.forked = True

    @property
    def can_fork(self) -> bool:
        """Whether sequences can part at any token: states of recurrent layers are kept at some only."""
        return self.states is None

    def chunk_end(self, request: CachedRequest, start: int, end: int, hit: PrefixHit | None = None) -> int:
        """Where a chunk planned for positions ``start .. end - 1`` should end, at most at ``end``.

        States must be kept at the ends of blocks if others are to go on from them.

        Args:
            hit: of a request that is not admitted yet.
        """
        if self.states is None or not self.enable_caching:
            return end
        branch = None if hit is None else hit.num_found
        return self.states.cut(request.request_id, start, end, len(request.token_ids), branch)

    def snapshot_is_coming(
        self, request: CachedRequest, hit: PrefixHit, running: Iterable[CachedRequest]
    ) -> bool:
        """Whether a running request is on its way to a snapshot that lets this one skip more than ``hit``."""
        size = self.block_size
        found = set(request.block_hashes[hit.num_tokens // size : hit.num_found // size])
        for other in running if found else ():
            blocks = (len(other.token_ids) - 1) // size
            if other.num_computed_tokens < blocks * size and other.block_hashes[blocks - 1] in found:
                return True
        return False

    def plan_state(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """The slots that the request's step up to ``num_tokens`` reads its state from and writes it to.

        0 and 0 without states.
        """
        return (0, 0) if self.states is None else self.states.plan(request_id, num_tokens)

    def publish_state(self, request: CachedRequest, num_tokens: int, slot: int) -> None:
        """Make the request's state after ``num_tokens``, now in ``slot``, findable, if that can be done."""
        if self.states is None or not self.enable_caching or num_tokens % self.block_size:
            return
        block_hash = request.block_hashes[num_tokens // self.block_size - 1]
        generated = num_tokens > request.num_prompt_tokens
        self.states.publish(request.request_id, slot, num_tokens, block_hash, generated=generated)

    def rollback(self, request_id: str, num_tokens: int) -> list[int]:
        """Takes back the slots above ``num_tokens`` and frees the blocks that held nothing else.

        Returns:
            The ids freed, to be cut off the end of the request's table.

        Raises:
            ValueError: the slots were never given, or lie in a published block, whose contents
                others may be reading.
        """
        table = self._tables[request_id]
        if num_tokens > table.num_slots:
            raise ValueError(f"cannot roll {request_id} back to {num_tokens}: it has {table.num_slots} slots")
        if num_tokens < table.num_published * self.block_size:
            raise ValueError(f"cannot roll {request_id} back to {num_tokens}: published blocks are final")
        keep = self.num_blocks_for(num_tokens)
        cut = table.blocks[keep:]
        del table.blocks[keep:]
        table.num_slots = num_tokens
        self.pool.free_blocks(reversed(cut))
        return [block.block_id for block in cut]

    def publish_rest(self, request: CachedRequest) -> None:
        """Publishes the last block of a request that is complete, if its tokens fill it.

        Where steps are planned before their tokens are known, no later allocation has done that.
        """
        table = self._tables[request.request_id]
        # The last token has been sampled, never computed.
        self._publish(request, table, min(table.num_slots, len(request.token_ids) - 1) // self.block_size)

    def free(self, request_id: str) -> None:
        """Gives the request's blocks back; published ones can be found until they are reused."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))
            if self.states is not None:
                self.states.free(request_id)

    def unpublish(self, block_ids: list[int]) -> None:
        """Makes blocks unfindable: their contents were not, or will not be, written as promised."""
        self.pool.unpublish(block_ids)

    def unpublish_from(self, request_id: str, num_tokens: int) -> None:
        """Makes the request's blocks from position ``num_tokens`` on unfindable."""
        table = self._tables[request_id]
        first = num_tokens // self.block_size
        self.pool.unpublish(block.block_id for block in table.blocks[first:])
        table.num_published = min(table.num_published, first)

    def condemn(self, request: CachedRequest) -> None:
        """Makes all that the request holds unfindable: what is in it is not to be trusted."""
        self.unpublish_from(request.request_id, 0)
        if self.states is not None:
            self.states.forget(request.block_hashes)

    def take_published(self) -> list[tuple[int, bytes]]:
        """Block id and digest of each block published since the last call."""
        published, self._published = self._published, []
        return published

    def is_published(self, block_id: int, block_hash: bytes) -> bool:
        """Whether this block is published under this digest."""
        return self.pool.blocks[block_id].block_hash == block_hash

    def reset_prefix_cache(self) -> bool:
        """Unpublishes everything; ``False``, and nothing done, while any request holds blocks."""
        done = self.pool.reset()
        if done and self._contents is not None:
            self._contents.clear()
        if done and self.states is not None:
            self.states.reset()
        return done

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        return self.pool.take_events()

    def check(self) -> None:
        """Asserts every invariant of tables and pool; O(blocks), for tests."""
        self.pool.check()
        if self.states is not None:
            self.states.check()
        owners = dict.fromkeys(range(1, len(self.pool.blocks)), 0)
        for request_id, table in self._tables.items():
            assert len(table.blocks) == self.num_blocks_for(table.num_slots), request_id
            ids = [block.block_id for block in table.blocks]
            assert len(set(ids)) == len(ids), f"{request_id} holds a block twice"
            assert table.num_published * self.block_size <= table.num_slots
            for block in () if table.forked else table.blocks[table.num_published :]:
                assert block.block_hash is None, f"{block} is published but not full"
            for block_id in ids:
                owners[block_id] += 1
        for block in self.pool.blocks[1:]:
            assert block.ref_count == owners[block.block_id], block

    def _publish(self, request: CachedRequest, table: _BlockTable, num_full: int) -> None:
        """Up to the first ``num_full`` blocks."""
        first, size = table.num_published, self.block_size
        if not self.enable_caching or num_full <= first:
            return
        table.num_published = num_full
        while first < num_full and table.blocks[first].block_hash is not None:  # a fork has done that
            assert table.blocks[first].block_hash == request.block_hashes[first]
            first += 1
        if first == num_full:
            return
        hashes = request.block_hashes[first:num_full]
        blocks = table.blocks[first:num_full]
        self.pool.publish(
            blocks,
            hashes,
            parent_hash=request.block_hashes[first - 1] if first else None,
            token_ids=request.token_ids[first * size : num_full * size],
        )
        if self._contents is not None:
            for i, (block, key) in enumerate(zip(blocks, hashes, strict=True), first):
                before = request.block_hashes[i - 1] if i else request.prefix_start
                held = request.token_ids[i * size : (i + 1) * size]
                self._contents.add(before, block.block_id, key, held)
        self._published += [(block.block_id, key) for block, key in zip(blocks, hashes, strict=True)]

    def _record_lookup(self, request: CachedRequest, hit: PrefixHit) -> None:
        # Counted on admission, not on every attempt of a request that waits for room.
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return
        queries = len(request.token_ids)
        if request.num_preemptions:
            self.stats.preempted_requests += 1
            self.stats.preempted_queries += queries
            self.stats.preempted_hits += hit.num_tokens
            return
        self.stats.requests += 1
        self.stats.queries += queries
        self.stats.hits += hit.num_tokens
        self.hit_rate.observe(1, queries, hit.num_tokens)
