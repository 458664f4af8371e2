"""Trial and Comparison: what is to be run in turns, and what came out."""

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from mlx_paged_attention.bench.spread import Spread
from mlx_paged_attention.bench.timing import METRICS, Values

# The pair whose results are not counted.
WARM_UP = -1

RatioKind = Literal["speed-up", "cost"]


@dataclass(frozen=True)
class Trial:
    """Runs to be measured in turns: A B, B A, A B, ... so that a drift of the machine hits both.

    Attributes:
        workload: which workload it belongs to.
        title: what is done, for a person.
        setting: its numbers.
        runs: by name, a function from the number of the pair to what was measured. The first is
            the subject, the others are what it is compared with.
        pairs: how many are counted; one more, :data:`WARM_UP`, is run first.
        ratio: whether the subject is asked how many times faster it is, or how many times as
            long it takes.
    """

    workload: str
    title: str
    setting: dict[str, int]
    runs: Mapping[str, Callable[[int], Values]]
    pairs: int
    ratio: RatioKind = "speed-up"

    @property
    def num_runs(self) -> int:
        return len(self.runs) * (self.pairs + 1)

    def run(self, turn: Callable[[str], AbstractContextManager[None]]) -> "Comparison":
        """Measure, each run inside ``turn(name)``, which may show whose turn it is."""
        results: dict[str, list[Values]] = {name: [] for name in self.runs}
        for pair in range(WARM_UP, self.pairs):
            names = list(self.runs)
            for name in names if pair % 2 == 0 else reversed(names):
                with turn(name):
                    gc.collect()  # nobody pays for another's garbage
                    values = self.runs[name](pair)
                if pair != WARM_UP:
                    results[name].append(values)
        return Comparison(self.workload, self.title, self.setting, results, self.ratio)


@dataclass(frozen=True)
class Comparison:
    """What a trial measured.

    Attributes:
        results: by name, one dict of values per pair; the first name is the subject.
    """

    workload: str
    title: str
    setting: dict[str, int]
    results: dict[str, list[Values]]
    ratio: RatioKind

    @property
    def subject(self) -> str:
        return next(iter(self.results))

    @property
    def baselines(self) -> list[str]:
        return list(self.results)[1:]

    @property
    def pairs(self) -> int:
        return len(self.results[self.subject])

    @property
    def metrics(self) -> list[str]:
        """Those that every run of everyone has."""
        runs = [values for results in self.results.values() for values in results]
        return [metric for metric in METRICS if all(metric in values for values in runs)]

    def values(self, name: str, metric: str) -> list[float]:
        return [values[metric] for values in self.results[name]]

    def spread(self, name: str, metric: str) -> Spread:
        return Spread.of(self.values(name, metric))

    def ratios(self, baseline: str, metric: str) -> list[float]:
        """One per pair: how many times better the subject is, or as a cost how many times its value."""
        pairs = zip(self.values(self.subject, metric), self.values(baseline, metric), strict=True)
        inverted = self.ratio == "speed-up" and METRICS[metric].better == "lower"
        return [other / own if inverted else own / other for own, other in pairs]

    def ratio_spread(self, baseline: str, metric: str) -> Spread:
        return Spread.of(self.ratios(baseline, metric))

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "title": self.title,
            "setting": self.setting,
            "pairs": self.pairs,
            "subject": self.subject,
            "results": {
                name: {metric: self._numbers(self.values(name, metric)) for metric in self.metrics}
                for name in self.results
            },
            "ratio": self.ratio,
            "ratios": {
                name: {metric: self._numbers(self.ratios(name, metric)) for metric in self.metrics}
                for name in self.baselines
            },
        }

    @staticmethod
    def _numbers(values: list[float]) -> dict[str, Any]:
        spread = Spread.of(values)
        return {
            "median": spread.median,
            "min": spread.lowest,
            "max": spread.highest,
            "values": values,
        }
