"""A ``BlocksView`` as lines for a terminal of any width."""

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mlx_paged_attention.api.report import counted, size
from mlx_paged_attention.engine.blocks_view import BlocksView, RequestView

_SIGNS = {"null": "0", "free": ".", "cached": "+", "used": "#", "shared": "="}
_LEGEND = "a-z one request's, = shared, + cached, . free, 0 null"
_LETTERS = string.ascii_lowercase + string.ascii_uppercase
_MAP_LINES = 8
_SHORTEST_ID, _LONGEST_ID = 12, 36

_Column = tuple[str, Callable[[RequestView], str]]

# The more important first: a narrow terminal leaves out the last ones.
_COLUMNS: tuple[_Column, ...] = (
    ("status", lambda one: one.status),
    ("blocks", lambda one: f"{one.blocks:,}"),
    ("prompt", lambda one: f"{one.prompt_tokens:,}"),
    ("output", lambda one: f"{one.output_tokens:,}"),
    ("cached", lambda one: f"{one.cached_tokens:,}"),
    ("empty", lambda one: f"{one.empty_slots:,}"),
    ("age s", lambda one: f"{one.age:.1f}"),
    ("preempted", lambda one: f"{one.preemptions:,}"),
    ("computed", lambda one: f"{one.computed_tokens:,}"),
)


def blocks_report(view: BlocksView, width: int, height: int | None = None) -> list[str]:
    """Counts, a map of the pool, and the requests.

    Args:
        width: columns; no line is longer.
        height: most lines; those that are left out are the last requests.
    """
    letters = dict(zip((one.request_id for one in view.requests), _LETTERS, strict=False))
    lines = [*_counts(view), *_map(view, letters, width), ""]
    room = len(view.requests) if height is None else max(0, height - len(lines) - 2)
    lines += _requests(view, letters, width, room)
    return [line[:width] for line in lines][:height]


def _counts(view: BlocksView) -> list[str]:
    stats = view.stats
    usable = stats.num_blocks - 1
    free = stats.free_blocks - stats.cached_blocks
    return [
        _printable(view.model),
        f"memory    {_share(stats.used_blocks, usable)} of {counted(usable, 'block')} of "
        f"{counted(stats.block_size, 'token')} used; {size(stats.pool_bytes)} of "
        f"{size(stats.pool_budget_bytes)} taken",
        f"blocks    {stats.used_blocks:,} used, {stats.cached_blocks:,} cached, {free:,} free",
        f"sharing   {counted(view.shared_blocks, 'block')} shared, which saves {view.saved_blocks:,}; "
        f"{view.copies:,} copied on write",
        f"waste     {view.waste:.1%}: {counted(view.empty_slots, 'slot')} of used blocks empty",
        f"prefixes  {view.hit_rate:.1%} of looked-up tokens hit, {view.recent_hit_rate:.1%} of late",
        f"requests  {stats.running:,} running, {stats.waiting:,} waiting; "
        f"{counted(stats.preemptions, 'preemption')} in {counted(stats.steps, 'step')}",
    ]


def _map(view: BlocksView, letters: Mapping[str, str], width: int) -> list[str]:
    """One sign for so many blocks that the map has a few lines; what most of them are."""
    signs = "".join(run.count * _sign(run.state, run.owners, letters) for run in view.runs)
    per_sign = -(-len(signs) // (max(1, width) * _MAP_LINES))
    if per_sign > 1:
        chunks = (signs[i : i + per_sign] for i in range(0, len(signs), per_sign))
        signs = "".join(Counter(chunk).most_common(1)[0][0] for chunk in chunks)
    rows = [signs[i : i + width] for i in range(0, len(signs), max(1, width))]
    legend = f"{_LEGEND}, # another's" if _SIGNS["used"] in signs else _LEGEND
    left_out = f"; {counted(view.blocks_left_out, 'more block')} not shown" if view.blocks_left_out else ""
    return ["", f"map       {counted(per_sign, 'block')} a sign: {legend}{left_out}", *rows]


def _sign(state: str, owners: Sequence[str], letters: Mapping[str, str]) -> str:
    return letters.get(owners[0], _SIGNS["used"]) if state == "used" and owners else _SIGNS[state]


def _requests(view: BlocksView, letters: Mapping[str, str], width: int, room: int) -> list[str]:
    if not view.requests:
        return ["no requests"]
    shown = view.requests[:room]
    names = [f"{letters.get(one.request_id, '#')} {_short(one.request_id, width // 2)}" for one in shown]
    columns = [["  request", *names]]
    used = max(map(len, columns[0]))
    for title, text in _COLUMNS:
        cells = [title, *(text(one) for one in shown)]
        used += 2 + max(map(len, cells))
        if used > width and len(columns) > 1:
            break
        columns.append(cells)
    widths = [max(map(len, cells)) for cells in columns]
    lines = [
        "  ".join(cell.ljust(widths[i]) if i < 2 else cell.rjust(widths[i]) for i, cell in enumerate(row))
        for row in zip(*columns, strict=True)
    ]
    if more := len(view.requests) - len(shown) + view.requests_left_out:
        lines.append(f"  and {more:,} more")
    return lines


def _short(request_id: str, width: int) -> str:
    """Its beginning and its end, where the number of an answer stands."""
    text, longest = _printable(request_id), max(_SHORTEST_ID, min(width, _LONGEST_ID))
    return text if len(text) <= longest else f"{text[: longest - 6]}..{text[-4:]}"


def _printable(text: str) -> str:
    """What a client chose must not command the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
