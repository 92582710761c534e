"""Tables and plots of RSD's figures (`studies.rsd.figures`), in the layout of the paper's appendices D.4 and D.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.plots import save
from redraft.loadtest.plots import COLORS, new_figure
from redraft.loadtest.results import save_report
from redraft.loadtest.tables import Table
from studies.rsd.figures import DEPTHS, published
from studies.rsd.shapes import ALGORITHMS, RSD_S, Experiment
from studies.rsd.store import Store

Part = Mapping[str, Any]
"""An experiment at one sampling setting, as `Figures.json` gives it."""


def write(store: Store, experiments: list[Experiment], folder: Path, console: Console) -> list[Path]:
    """Print the tables; write `experiments.json` and a plot per experiment. Returns what was written."""
    figures = published(store, experiments)
    for part in figures["experiments"]:
        best_shapes([part]).show(console)
        all_shapes(part).show(console)
    written = [store.path, folder / "experiments.json"]
    save_report(written[-1], figures)
    for name in dict.fromkeys(part["experiment"] for part in figures["experiments"]):
        written.append(save(plot(parts_of(figures, name)), folder / f"{name}.png"))
    return written


def parts_of(figures: Mapping[str, Any], name: str) -> list[Part]:
    """The settings of an experiment, by its name in EXPERIMENTS."""
    return [part for part in figures["experiments"] if part["experiment"] == name]


def best_shapes(parts: Sequence[Part]) -> Table:
    """Block efficiency of each algorithm's best tree in every cell, and RSD-S less the best of the paper's others."""
    columns = ["temperature", parts[0]["axis"], *ALGORITHMS, f"{RSD_S} less the next of the paper's"]
    table = Table(f"{parts[0]['title']}: block efficiency (best tree)", columns)
    for part in parts:
        values = {(s["cell"], s["method"], s["tree"]): s["block_efficiency"]["value"] for s in part["shapes"]}
        for cell, best in part["best"].items():
            texts = [f"{values[int(cell), name, best[name]]:.2f} ({best[name]})" if name in best else "-"
                     for name in ALGORITHMS]  # fmt: skip
            lead = estimate(part["lead"][cell], "+.2f")
            table.rows.append([f"{part['sampling']['temperature']:g}", cell, *texts, lead])
    return table


def all_shapes(part: Part) -> Table:
    """Every shape: block efficiency with its interval, conditional acceptance, MBSU, token rate and speed-up."""
    depths = [f"depth {depth}" for depth in range(1, DEPTHS + 1)]
    columns = ["", "method", "tree", "nodes", "block efficiency", *depths, "MBSU", "tokens/s", "speed-up"]
    table = Table(f"{part['title']}, temperature {part['sampling']['temperature']:g}: all shapes", columns)
    for shape in part["shapes"]:
        rates = [f"{rate:.2f}" for rate in shape["conditional_acceptance"]]
        table.rows.append(
            [str(shape["cell"]), shape["method"], shape["tree"], str(shape["nodes"]),
             estimate(shape["block_efficiency"]), *rates, *["-"] * (DEPTHS - len(rates)), estimate(shape["mbsu"]),
             estimate(shape["tokens_per_s"], ".0f"), estimate(shape["speedup"])]
        )  # fmt: skip
    return table


def estimate(found: Mapping[str, Any] | None, spec: str = ".2f") -> str:
    """A value with its interval; a dash where nothing was measured."""
    if found is None:
        return "-"
    text = format(found["value"], spec)
    if not found["interval"]:
        return text
    low, high = (format(end, spec) for end in found["interval"])
    return f"{text} ({low} to {high})"


def plot(parts: Sequence[Part]) -> Figure:
    """RSD's figures 4 and 5: block efficiency and, where they were timed, tokens/s of each cell's best trees, with 95%
    intervals over prompts; a pair of panels per setting."""
    keys = ("block_efficiency", "tokens_per_s")
    panels = [(part, key) for part in parts for key in keys if any(shape[key] for shape in part["shapes"])]
    figure, axes = new_figure(len(panels), columns=2)
    for axis, (part, key) in zip(axes, panels, strict=True):
        cells = list(dict.fromkeys(shape["cell"] for shape in part["shapes"]))
        for position, (name, color) in enumerate(zip(ALGORITHMS, COLORS, strict=False)):
            points = [best for cell in cells if (best := highest(part["shapes"], name, cell, key))]
            at = [cells.index(shape["cell"]) + 0.07 * (position - (len(ALGORITHMS) - 1) / 2) for shape in points]
            values = [shape[key]["value"] for shape in points]
            errors = [
                [abs(value - shape[key]["interval"][end]) for value, shape in zip(values, points, strict=True)]
                for end in (0, 1)
            ]
            axis.errorbar(at, values, errors, fmt="o-", color=color, label=name, ms=4, lw=1.2, elinewidth=0.8)
        axis.set_xticks(range(len(cells)), [str(cell) for cell in cells])
        axis.set_xlabel(part["axis"])
        title = "Block efficiency" if key == "block_efficiency" else "Tokens/s"
        axis.set_title(f"{title}, temperature {part['sampling']['temperature']:g}", loc="left", fontsize=10)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def highest(shapes: Sequence[Mapping[str, Any]], method: str, cell: int, key: str) -> Mapping[str, Any] | None:
    """The shape of a method in a cell whose `key` is highest; None where none was measured."""
    rows = [shape for shape in shapes if shape["method"] == method and shape["cell"] == cell and shape[key]]
    return max(rows, key=lambda shape: shape[key]["value"], default=None)
