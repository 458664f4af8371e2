"""Report: everything that was measured and on what, as JSON and as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from mlx_paged_attention.bench.comparison import Comparison
from mlx_paged_attention.bench.machine import Facts
from mlx_paged_attention.bench.settings import BenchSettings
from mlx_paged_attention.bench.spread import Spread, number
from mlx_paged_attention.bench.timing import METRICS

JSON_VERSION = 1
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclass(frozen=True)
class Report:
    """A benchmark's outcome.

    Attributes:
        facts: machine, versions, model.
        notes: what a reader must know to read the numbers right.
        seconds: how long it took, loading included.
    """

    settings: BenchSettings
    facts: Facts
    comparisons: list[Comparison]
    notes: list[str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """JSON-compatible; every number with its median, both ends and all its values."""
        return {
            "version": JSON_VERSION,
            "settings": asdict(self.settings),
            "facts": self.facts,
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def as_text(self) -> str:
        """For a terminal, and for a page: Markdown."""
        facts = [f"{name}: {value}" for name, value in self.facts.items()]
        parts = ["\n".join(f"- {fact}" for fact in facts)]
        parts += [_section(comparison) for comparison in self.comparisons]
        parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


def _section(comparison: Comparison) -> str:
    return (
        f"### {comparison.workload}: {comparison.title}\n\n"
        f"Median (lowest to highest) of {comparison.pairs} runs each, in turns.\n\n{_table(comparison)}"
    )


def _table(comparison: Comparison) -> str:
    names = list(comparison.results)
    words = "faster than" if comparison.ratio == "speed-up" else "relative to"
    heads = [f"{words} {other}" for other in comparison.baselines]
    rows = [["", *names, *heads]]
    for metric in comparison.metrics:
        what = METRICS[metric]
        row = [f"{what.label} {_ARROWS[what.better]}"]
        row += [str(comparison.spread(name, metric)) for name in names]
        row += [_times(comparison.ratio_spread(other, metric)) for other in comparison.baselines]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, [("-" * widths[0]), *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| "
        + " | ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    )


def _times(spread: Spread) -> str:
    return f"{number(spread.median)}x ({number(spread.lowest)} to {number(spread.highest)})"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
