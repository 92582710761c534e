"""The plot of load tests, and the house style of plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from redraft.loadtest.results import LONG_MS, Run, by_rate, circumstances, rate_name

COLORS = ("#6b7280", "#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#db2777", "#65a30d")


def new_figure(
    panels: int, width: float = 4.2, height: float = 3.6, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Panels in the house style, in one row or in rows of `columns`; sizes in inches per panel.

    A page shows a figure of two columns at about its own size, and wider ones smaller.
    """
    columns = columns or panels
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=130)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


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
            axis.plot(x, high, ".--", color=color, alpha=0.7, label=f"{runs[0].label}, p90")
        throughput = [fmean(run.figures["output_token_throughput"] for run in group) for group in groups.values()]
        axes[2].plot(x, throughput, "o-", color=color)
    titles = ("Time to first token", "Time per output token", "Output throughput")
    for axis, title, unit in zip(axes, titles, ("ms", "ms", "tokens/s"), strict=True):
        axis.set_title(title, loc="left")
        axis.set_ylabel(unit)
        if unit == "ms" and axis.get_ylim()[1] > LONG_MS:
            axis.set_ylabel("s")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}")
        axis.set_xlabel("offered load, requests/s")
        axis.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates])
        axis.set_xlim(-0.4, len(rates) - 0.6)
        axis.set_ylim(bottom=0)
    texts = [f"{runs[0].label}: {text}" for runs in labels if (text := circumstances(runs))]
    figure.suptitle("\n".join(texts), fontsize=8, color="#4b5563", x=0.01, ha="left")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    path = folder / "load_test.png"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _mean(runs: list[Run], name: str, key: str) -> float:
    """The mean over runs of a distribution's figure, nan where none has it."""
    known = [run.figures[name][key] for run in runs if run.figures[name]]
    return fmean(known) if known else math.nan
