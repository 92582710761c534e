"""Plots of benchmark figures, written as PNG or SVG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.results import Run, by_rate, rate_name

COLORS = ("#6b7280", "#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#db2777", "#65a30d")


def new_figure(panels: int, width: float = 4.2, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A row of panels in the house style; sizes in inches per panel."""
    figure = Figure(figsize=(width * panels, height), layout="constrained", dpi=130)
    axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as the kind of file that its name says, making its folder; an SVG without its date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def load_test(labels: Sequence[list[Run]], folder: Path) -> Path:
    """`load_test.png`: TTFT, TPOT and throughput against the offered request rate, a line per label.

    Solid is the mean, dashed the 90th percentile, both averaged over runs. Rates are evenly spaced, so that `inf` has
    a place.
    """
    rates = sorted({run.request_rate for runs in labels for run in runs})
    figure, axes = new_figure(3)
    for color, runs in zip(cycle(COLORS), labels, strict=False):
        groups = by_rate(runs)
        x = [rates.index(rate) for rate in groups]
        for axis, name in zip(axes, ("ttft_ms", "tpot_ms"), strict=False):
            mean, high = ([_mean(group, name, key) for group in groups.values()] for key in ("mean", "p90"))
            axis.plot(x, mean, "o-", color=color, label=f"{runs[0].label}, mean")
            axis.plot(x, high, "--", color=color, alpha=0.7, label=f"{runs[0].label}, p90")
        throughput = [fmean(run.figures["output_token_throughput"] for run in group) for group in groups.values()]
        axes[2].plot(x, throughput, "o-", color=color)
    titles = ("Time to first token", "Time per output token", "Output throughput")
    for axis, title, unit in zip(axes, titles, ("ms", "ms", "tokens/s"), strict=True):
        axis.set_title(title, loc="left")
        axis.set_ylabel(unit)
        axis.set_xlabel("offered load, requests/s")
        axis.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates])
        axis.set_xlim(-0.4, len(rates) - 0.6)
        axis.set_ylim(bottom=0)
    circumstances = dict.fromkeys(runs[0].circumstances.removeprefix("; ") for runs in labels)
    figure.suptitle("\n".join(filter(None, circumstances)), fontsize=8, color="#4b5563", x=0.01, ha="left")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    return save(figure, folder / "load_test.png")


def _mean(runs: list[Run], name: str, key: str) -> float:
    """The mean over runs of a distribution's figure, nan where none has it."""
    known = [run.figures[name][key] for run in runs if run.figures[name]]
    return fmean(known) if known else math.nan


def grouped_bars(
    axis: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, title: str, digits: int = 0
) -> None:
    """Bars per group and series, each with its value written above."""
    width = 0.8 / len(series)
    for index, (color, (label, values)) in enumerate(zip(cycle(COLORS), series.items(), strict=False)):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(groups))]
        bars = axis.bar(places, values, width * 0.92, color=color, label=label)
        texts = ["" if math.isnan(value) else f"{value:.{digits}f}" for value in values]
        axis.bar_label(bars, texts, fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.set_ylim(top=1.15 * axis.get_ylim()[1])
    axis.set_ylabel(unit)
    axis.set_title(title, loc="left")


def lines(
    axis: Axes, series: Mapping[str, Sequence[float] | Mapping[str, float]], labels: tuple[str, str, str]
) -> None:
    """A line per series: values by name of the place, or values at 1, 2, 3, ...; places are evenly spaced.

    Labels are the title, the x and the y axis.
    """
    named = {
        label: values if isinstance(values, Mapping) else {str(place): value for place, value in enumerate(values, 1)}
        for label, values in series.items()
    }
    places = list(dict.fromkeys(place for values in named.values() for place in values))
    for color, (label, values) in zip(cycle(COLORS[1:]), named.items(), strict=False):
        axis.plot([places.index(place) for place in values], list(values.values()), "o-", color=color, label=label)
    axis.set_xticks(range(len(places)), places)
    axis.set_title(labels[0], loc="left")
    axis.set_xlabel(labels[1])
    axis.set_ylabel(labels[2])
    axis.set_ylim(bottom=0)
    if named:
        axis.legend(frameon=False, fontsize=8)
