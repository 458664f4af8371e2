"""Pictures of memory.py's results: one for each part, on white, so that dark pages show them, too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arrivals
import memory_shared as shared
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlx_paged_attention.bench.spread import Spread, number

Result = dict[str, Any]

OURS, THEIRS, OTHER = "#1f77b4", "#ff7f0e", "#8c8c8c"
# Useful memory in the paper on PagedAttention, reserved in two ways and paged (Kwon et al. 2023, figure 2).
PAPER = (0.204, 0.382, 0.963)


def _figure(panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(max(6.4, 3.6 * panels), 3.4), layout="constrained", facecolor="white")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _bars(panel: Axes, names: Sequence[str], values: Sequence[float], colors: Any, form: str) -> None:
    bars = panel.bar(names, values, color=colors)
    panel.bar_label(bars, [form.format(value) for value in values], fontsize=8)
    panel.margins(y=0.12)
    panel.tick_params(labelsize=8)


def waste(result: Result, path: Path) -> None:
    figure, (panel,) = _figure()
    _bars(panel, list(result["waste"]), [100 * one for one in result["waste"].values()], OURS, "{:.1f} %")
    panel.axhline(4, color=OTHER, linestyle=":", label="4 %")
    panel.set(xlabel="block size, tokens", ylabel="slots held and empty, %", title="Waste")
    panel.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=100)


def held(result: Result, path: Path) -> None:
    figure, (left, right) = _figure(2)
    names = [name.replace(", ", ",\n").replace(" for ", "\nfor ") for name in result["ways"]]
    colors = [OTHER if "reserved" in name else THEIRS if "mlx-lm" in name else OURS for name in names]
    ways = result["ways"].values()
    _bars(left, names, [one["requests"] for one in ways], colors, "{:.0f}")
    left.set_title(f"Requests at once in {result['slots']:,} slots", fontsize=9)
    _bars(right, names, [100 * one["useful"] for one in ways], colors, "{:.0f} %")
    right.set_title("Slots with a token, % of the memory; dotted: the paper", fontsize=9)
    for share in PAPER:
        right.axhline(100 * share, color=OTHER, linewidth=0.8, linestyle=":")
    for panel in (left, right):
        panel.tick_params(axis="x", labelsize=6)
    figure.savefig(path, dpi=100)


def sharing(result: Result, path: Path) -> None:
    figure, panels = _figure(2)
    ways = {"sampled": "answers to a prompt (n)", "beams": "beams"}
    for panel, (way, label) in zip(panels, ways.items(), strict=True):
        answers = result[way]
        _bars(panel, list(answers), [100 * one["saved"] for one in answers.values()], OURS, "{:.0f} %")
        panel.set_ylim(0, 100)
        panel.set_xlabel(label, fontsize=8)
    panels[0].set_ylabel("blocks saved, %", fontsize=8)
    figure.savefig(path, dpi=100)


def ttft(result: Result, path: Path) -> None:
    figure, (panel,) = _figure()
    for place, (name, color) in enumerate((("cold", OTHER), ("warm", OURS))):
        one = Spread.of(result[f"{name}_ms"])
        error = [[one.median - one.lowest], [one.highest - one.median]]
        panel.bar(name, one.median, yerr=error, capsize=4, color=color)
        panel.annotate(f"{number(one.median)} ms", (place + 0.05, one.median), fontsize=8, va="bottom")
    title = f"First token of {result['prefix']:,} + {result['suffix']} tokens"
    panel.set(ylabel="TTFT, ms", title=title)
    panel.margins(y=0.12)
    figure.savefig(path, dpi=100)


def context(result: Result, path: Path) -> None:
    longest = result["longest"]
    figure, panels = _figure(len(longest))
    for panel, (scenario, by_users) in zip(panels, longest.items(), strict=True):
        for i, (name, color) in enumerate((("ours", OURS), ("mlx-lm", THEIRS))):
            places = [place + 0.4 * i - 0.2 for place in range(len(by_users))]
            bars = panel.bar(places, [both[i] for both in by_users.values()], 0.38, color=color, label=name)
            panel.bar_label(bars, fmt="{:,.0f}", fontsize=6)
        panel.set_xticks(range(len(by_users)), list(by_users))
        panel.set_title(shared.SCENARIOS[scenario], fontsize=8)
        panel.set_xlabel("users", fontsize=8)
        panel.margins(y=0.12)
    panels[0].set_ylabel("longest prompt + answer, tokens", fontsize=8)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


PLOTS: dict[str, Callable[[Result, Path], None]] = {
    "waste": waste,
    "held": held,
    "sharing": sharing,
    "ttft": ttft,
    "context": context,
    "arrivals": arrivals.plot,
}
