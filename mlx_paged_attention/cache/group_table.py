"""GroupTable and RequestTable: the blocks that a request holds."""

from dataclasses import dataclass

from mlx_paged_attention.cache.block import Block


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """Blocks of a request's tables that others hold, too, and in whose place it got blocks of its own.

    Attributes:
        index: in the tables.
        pairs: for each layer group, source and target of what is to be copied before anything is written.
    """

    index: int
    pairs: list[tuple[int, int]]


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
        copied: what the last allocation copied.
        forked: blocks that were not published then are, or were, another's, too.
    """

    groups: list[GroupTable]
    num_slots: int = 0
    copied: CopyOnWrite | None = None
    forked: bool = False

    @property
    def num_blocks(self) -> int:
        """Length of each group's table."""
        return len(self.groups[0].blocks)
