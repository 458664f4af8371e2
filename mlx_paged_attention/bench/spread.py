"""Spread: a median, and how far the runs lay apart."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Spread:
    """Of several runs: the middle and both ends."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        """``61.2 (60.1 to 63.0)``."""
        return f"{number(self.median)} ({number(self.lowest)} to {number(self.highest)})"


def number(value: float) -> str:
    """Three significant digits or all of the integer part, as tables want it."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
