"""Bars, lines, and files of plots in the house style of `redraft.loadtest.plots`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from redraft.loadtest.plots import COLORS

LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
NAMESPACES = {"": "http://www.w3.org/2000/svg", "xlink": "http://www.w3.org/1999/xlink"}


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


def grouped_bars(
    axis: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, title: str, digits: int = 0
) -> None:
    """Bars per group and series, each with its value written above."""
    width = 0.8 / len(series)
    for index, (color, (label, values)) in enumerate(zip(cycle(COLORS), series.items(), strict=False)):
        positions = [x + (index - (len(series) - 1) / 2) * width for x in range(len(groups))]
        bars = axis.bar(positions, values, width * 0.92, color=color, label=label)
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
        label: values if isinstance(values, Mapping) else {str(x): value for x, value in enumerate(values, 1)}
        for label, values in series.items()
    }
    positions = list(dict.fromkeys(x for values in named.values() for x in values))
    for color, (label, values) in zip(cycle(COLORS[1:]), named.items(), strict=False):
        axis.plot([positions.index(x) for x in values], list(values.values()), "o-", color=color, label=label)
    axis.set_xticks(range(len(positions)), positions)
    axis.set_title(labels[0], loc="left")
    axis.set_xlabel(labels[1])
    axis.set_ylabel(labels[2])
    axis.set_ylim(bottom=0)
    if named:
        axis.legend(frameon=False, fontsize=8)
