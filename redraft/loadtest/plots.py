"""Plots of benchmark figures, written as PNG or SVG files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from redraft.loadtest.results import LONG_MS, Run, by_rate, circumstances, rate_name

LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
NAMESPACES = {"": "http://www.w3.org/2000/svg", "xlink": "http://www.w3.org/1999/xlink"}
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


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as the kind of file that its name says, making its folder; an SVG without its date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        path.write_text(compact(text.getvalue()), encoding="utf-8")
    else:
        figure.savefig(path)
    return path


def compact(svg: str) -> str:
    """An SVG of matplotlib that looks the same at half the size: numbers have two decimals, a hundredth of a point, and
    groups that only name their content are gone."""
    for name, address in NAMESPACES.items():
        ElementTree.register_namespace(name, address)
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for name, value in element.attrib.items():
            rounded = LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value)
            element.set(name, " ".join(rounded.split()))
    _ungroup(root)
    ElementTree.indent(root, space="")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _ungroup(element: ElementTree.Element) -> list[ElementTree.Element]:
    """What stands for an element: itself, or its content where it is a group without a look."""
    element[:] = [part for child in element for part in _ungroup(child)]
    return list(element) if element.tag.endswith("}g") and set(element.attrib) <= {"id"} else [element]


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
