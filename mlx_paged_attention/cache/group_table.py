"""GroupTable and RequestTable: the blocks that a request holds."""

from dataclasses import dataclass, field

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_need import BlockNeed


@dataclass(slots=True)
class TableChanges:
    """What an allocation changed in tables beside appending to them.

    Attributes:
        copies: sources and targets of blocks to copy before anything is written.
        indices: where other blocks stand than before.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


@dataclass(slots=True)
class GroupTable:
    """A layer group's block table of one request.

    Attributes:
        blocks: by position; the null block in the place of those behind the window.
        num_published: leading blocks that were found or made published.
        num_behind: leading blocks that lie behind the window, and are not held.
    """

    blocks: list[Block]
    num_published: int
    num_behind: int

    @property
    def held(self) -> list[Block]:
        return self.blocks[self.num_behind :]

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.num_behind

    def give_up(self, num_blocks: int, null: Block) -> list[Block]:
        """The leading ``num_blocks`` blocks are behind the window: those still held, last first."""
        begin = self.num_behind
        if num_blocks <= begin:
            return []
        freed = self.blocks[begin:num_blocks]
        self.blocks[begin:num_blocks] = [null] * len(freed)
        self.num_behind = num_blocks
        return freed[::-1]


@dataclass(slots=True)
class RequestTable:
    """A request's tables, one per layer group and all equally long.

    Attributes:
        num_slots: tokens it has room assigned for.
        changes: by the last allocation.
        forked: blocks that were not published then are, or were, another's, too.
    """

    groups: list[GroupTable]
    num_slots: int = 0
    changes: TableChanges = field(default_factory=TableChanges)
    forked: bool = False

    @property
    def held(self) -> list[Block]:
        """The blocks that are not behind a window, one group after the other."""
        return [block for group in self.groups for block in group.held]

    def missing(self, need: BlockNeed, num_tokens: int) -> int:
        """Blocks that it may take, beyond those it holds, on the way to ``num_tokens`` tokens."""
        missing = 0
        for window, group in zip(need.windows, self.groups, strict=True):
            still = -(-num_tokens // need.block_size) - len(group.blocks)
            missing += max(0, min(still, need.of_group(window, num_tokens) - group.num_held))
        return missing

    def holds_window(self, need: BlockNeed, num_tokens: int) -> bool:
        """Whether all that the token after ``num_tokens`` tokens looks at is there."""
        return all(
            need.first_useful(window, num_tokens) >= group.num_behind
            for window, group in zip(need.windows, self.groups, strict=True)
        )

    def give_up(self, need: BlockNeed, num_tokens: int, null: Block) -> list[Block]:
        """The blocks that no token after ``num_tokens`` looks at; the null block takes their places."""
        return [
            block
            for window, group in zip(need.windows, self.groups, strict=True)
            for block in group.give_up(need.first_useful(window, num_tokens), null)
        ]

    def fork(self, num_tokens: int, block_size: int) -> "RequestTable":
        """A table of the same blocks, of the first ``num_tokens`` tokens."""
        self.forked = True
        keep, full = -(-num_tokens // block_size), num_tokens // block_size
        groups = [
            GroupTable(group.blocks[:keep], min(group.num_published, full), group.num_behind)
            for group in self.groups
        ]
        return RequestTable(groups, num_tokens, forked=True)

    def partial_block(self, computed: int, num_slots: int, block_size: int) -> int | None:
        """Index of the block that holds tokens and is now to be written from within, if there is one.

        Args:
            num_slots: that there are to be.
        """
        begin = max(computed, self.num_slots)  # slots that were given before have been written
        inside = begin % block_size and num_slots > begin
        return begin // block_size if inside else None

    def check(self, request_id: str, block_size: int) -> None:
        """Asserts its invariants, for tests."""
        held = [block.block_id for block in self.held]
        assert len(set(held)) == len(held), f"{request_id} holds a block twice"
        assert 0 not in held, f"{request_id} holds the null block"
        for group in self.groups:
            assert len(group.blocks) == -(-self.num_slots // block_size), request_id
            assert all(block.is_null for block in group.blocks[: group.num_behind]), request_id
            assert group.num_published * block_size <= self.num_slots
            for block in () if self.forked else group.blocks[group.num_published :]:
                assert block.block_hash is None, f"{block} is published but not full"
