"""Plots of a report, one picture per workload."""

import importlib.util
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from mlx_paged_attention.bench.comparison import Comparison
from mlx_paged_attention.bench.report import Report
from mlx_paged_attention.bench.timing import METRICS
from mlx_paged_attention.errors import MlxPagedError

_ARROWS = {"higher": "higher is better", "lower": "lower is better"}


def require_matplotlib() -> None:
    """Raise MlxPagedError, with what to install, where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MlxPagedError("--plot needs matplotlib: run pip install 'mlx-paged-attention[bench]'")


def write_plots(report: Report, directory: Path) -> list[Path]:
    """Write ``WORKLOAD.png``: bars are medians, whiskers reach from the lowest run to the highest.

    Comparisons of one workload that measure the same of the same share a picture.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    groups = groupby(report.comparisons, key=lambda one: (one.workload, tuple(one.results)))
    for (workload, names), group in groups:
        comparisons = list(group)
        taken = any(path.stem == workload for path in paths)
        path = directory / f"{workload}{'-' + names[0].replace(' ', '-') if taken else ''}.png"
        _write(path, comparisons, list(names), f"{report.facts['model']}, {report.facts['processor']}")
        paths.append(path)
    return paths


def _write(path: Path, comparisons: Sequence[Comparison], names: list[str], subtitle: str) -> None:
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    shared = [m for m in METRICS if all(m in one.metrics for one in comparisons)]
    figure = Figure(figsize=(4 * len(shared), 4), layout="constrained")
    title = comparisons[0].title if len(comparisons) == 1 else comparisons[0].workload
    figure.suptitle(f"{title}\n{subtitle}", fontsize=9)
    panels = figure.subplots(1, len(shared), squeeze=False)[0]
    width = 0.8 / len(names)
    for panel, metric in zip(panels, shared, strict=True):
        for i, name in enumerate(names):
            spreads = [one.spread(name, metric) for one in comparisons]
            medians = [spread.median for spread in spreads]
            below = [spread.median - spread.lowest for spread in spreads]
            above = [spread.highest - spread.median for spread in spreads]
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(comparisons))]
            panel.bar(places, medians, width, yerr=[below, above], capsize=3, label=name)
        panel.set_xticks(range(len(comparisons)), [str(one.setting["concurrency"]) for one in comparisons])
        panel.set_xlabel("requests at once")
        panel.set_title(f"{METRICS[metric].label}\n({_ARROWS[METRICS[metric].better]})", fontsize=9)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
