"""Tables and plots of RSD's experiments from what was measured, in the layout of the paper's appendix D.4 and D.5."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.intervals import interval, ratio, statistic
from benchmarks.plots import COLORS, new_figure, save
from benchmarks.quality import Measure
from benchmarks.rsd_shapes import ALGORITHMS, PUBLISHED, RSD_S, Experiment, Shape
from benchmarks.rsd_store import BASELINE, Row, Store, sums
from benchmarks.tables import Table, number

QUALITY_RESAMPLES = 400
DEPTHS = 3
References = Mapping[str, tuple[str, ...]]
"""Texts that answer a prompt as it should be, by question_id."""


@dataclass(frozen=True)
class Efficiency:
    """Block efficiency (acceptance length) of a method at a setting, also in every re-sample of the prompts."""

    value: float
    samples: np.ndarray

    @classmethod
    def of(cls, rows: list[Row], prompts: list[str]) -> Efficiency:
        """Tokens gained per step over all rows."""
        accepted, steps = sums(rows, prompts, "accepted", "steps").T
        return cls(1 + float(accepted.sum() / steps.sum()), 1 + ratio(accepted, steps))


class Figures:
    """What a store holds of one experiment at one setting."""

    def __init__(self, store: Store, setting: str, experiment: Experiment):
        self.store, self.setting, self.experiment = store, setting, experiment
        self.prompts: list[str] = store.settings[setting]["prompts"]
        self.rows = store.rows.get(setting, {})
        shapes = {shape for cell in experiment.cells.values() for shape in cell if self.rows.get(shape.method)}
        self.efficiency = {shape: Efficiency.of(self.rows[shape.method], self.prompts) for shape in shapes}

    @property
    def title(self) -> str:
        """The experiment and how tokens were sampled."""
        filters = "".join(f", {name.replace('_', '-')} {value:g}" for name, value in self.sampling.items())
        return f"{self.experiment.title}{filters}"

    @property
    def sampling(self) -> dict[str, float]:
        return self.store.settings[self.setting]["sampling"]

    def measured(self) -> Iterator[tuple[int, Shape]]:
        """Cells and their shapes that have been measured."""
        for cell, shapes in self.experiment.cells.items():
            yield from ((cell, shape) for shape in shapes if shape in self.efficiency)

    def best(self, cell: int, algorithm: str) -> Shape | None:
        """The shape with the highest block efficiency of an algorithm in a cell."""
        shapes = [s for s in self.experiment.cells[cell] if s.algorithm == algorithm and s in self.efficiency]
        return max(shapes, key=lambda shape: self.efficiency[shape].value, default=None)

    def memory_bound(self, shape: Shape) -> float:
        """MBSU's divisor: a step's cost where time is the reading of weights, 1 for auto-regressive decoding."""
        setup = self.store.setup
        return 1 + shape.length * setup["draft_parameters"] / setup["target_parameters"]

    def rate(self, method: str) -> float | None:
        """Tokens per second of a single stream after its first token; None where it was not timed."""
        timed = self.store.timing.get(self.setting, {}).get(method)
        return sum(tokens for tokens, _ in timed.values()) / sum(s for _, s in timed.values()) if timed else None

    def speedup(self, method: str) -> float | None:
        """The token rate over auto-regressive decoding's, on the prompts that both were timed on."""
        timing = self.store.timing.get(self.setting, {})
        ours, base = timing.get(method, {}), timing.get(BASELINE, {})
        if not (common := ours.keys() & base.keys()):
            return None
        per_token = [sum(part[key][1] for key in common) / sum(part[key][0] for key in common) for part in (ours, base)]
        return per_token[1] / per_token[0]


def write(
    store: Store, experiments: list[Experiment], references: References, folder: Path, console: Console
) -> list[Path]:
    """Print the summaries; write `tables.md` with every table, and the plots. Returns what was written."""
    written, markdown = [store.path], list[str]()
    for setting in store.settings:
        tables = list[Table]()
        for experiment in experiments:
            figures = Figures(store, setting, experiment)
            if figures.efficiency:
                tables += [summary(figures), details(figures)]
                written.append(plot(figures, references, folder / f"{experiment.name}-temperature-{setting}.png"))
        if quality := quality_table(store, setting, references):
            tables.append(quality)
        for table in tables:
            table.show(console)
        markdown += [f"### {table.title}\n{table.markdown()}\n" for table in tables]
    if markdown:
        written.append(folder / "tables.md")
        written[-1].write_text("\n".join(markdown), encoding="utf-8")
    return written


def summary(figures: Figures) -> Table:
    """Block efficiency of each algorithm's best shape in every cell, and RSD-S less the best of the paper's others."""
    columns = [figures.experiment.axis, *ALGORITHMS, f"{RSD_S} less next", "95%"]
    table = Table(f"{figures.title}: block efficiency, best shapes", columns)
    for cell in figures.experiment.cells:
        best = {algorithm: figures.best(cell, algorithm) for algorithm in ALGORITHMS}
        texts = [f"{figures.efficiency[s].value:.2f} ({s.spec})" if s else "-" for s in best.values()]
        if any(best.values()):
            table.rows.append([str(cell), *texts, *lead(figures, best)])
    return table


def lead(figures: Figures, best: dict[str, Shape | None]) -> list[str]:
    """By how much RSD-S is ahead of the best other of the paper's algorithms, and its interval over prompts."""
    ours = best[RSD_S]
    others = [shape for name in PUBLISHED if name != RSD_S and (shape := best[name])]
    if ours is None or not others:
        return ["-", "-"]
    first, second = (
        figures.efficiency[ours],
        max((figures.efficiency[shape] for shape in others), key=lambda e: e.value),
    )
    low, high = interval(first.samples - second.samples)
    return [f"{first.value - second.value:+.2f}", f"{low:+.2f} to {high:+.2f}"]


def details(figures: Figures) -> Table:
    """Every shape: block efficiency with its interval, conditional acceptance, MBSU, token rate and speed-up."""
    depths = [f"depth {depth}" for depth in range(1, DEPTHS + 1)]
    columns = ["", "method", "tree", "nodes", "block efficiency", "95%", *depths, "MBSU", "tokens/s", "speed-up"]
    table = Table(f"{figures.title}: all shapes", columns)
    for cell, shape in figures.measured():
        efficiency = figures.efficiency[shape]
        low, high = interval(efficiency.samples)
        speedup = figures.speedup(shape.method)
        table.rows.append(
            [
                str(cell), shape.algorithm, shape.spec, str(shape.nodes), f"{efficiency.value:.2f}",
                f"{low:.2f} to {high:.2f}", *conditional_acceptance(figures.rows[shape.method]),
                f"{efficiency.value / figures.memory_bound(shape):.2f}", number(figures.rate(shape.method)),
                f"{speedup:.2f}x" if speedup else "-",
            ]
        )  # fmt: skip
    return table


def conditional_acceptance(rows: list[Row]) -> list[str]:
    """Accepted over offered at the first depths."""
    found = []
    for depth in range(DEPTHS):
        accepted, offered = (
            sum(counts[depth] for row in rows if depth < len(counts := getattr(row, f"{kind}_by_depth")))
            for kind in ("accepted", "offered")
        )
        found.append(f"{accepted / offered:.2f}" if offered else "-")
    return found


def quality_table(store: Store, setting: str, references: References) -> Table | None:
    """BLEU or ROUGE-2 by task, all shapes of an algorithm together, and the difference to auto-regressive sampling;
    None without references."""
    rows = store.rows.get(setting, {})
    categories = sorted({row.category for row in rows.get(BASELINE, []) if row.question_id in references})
    if not categories:
        return None
    measures = {category: Measure.for_category(category) for category in categories}
    heads = [head for c, m in measures.items() for head in (f"{m.name}, {c}", "95%", "less auto-regressive", "95%")]
    filters = "".join(f", {name.replace('_', '-')} {v:g}" for name, v in store.settings[setting]["sampling"].items())
    table = Table(f"Quality against references{filters}: all shapes together", ["", "answers", *heads])
    base: dict[str, tuple[float, np.ndarray]] = {}
    for name in ("auto-regressive", *ALGORITHMS):
        prefix = BASELINE if name == "auto-regressive" else name.lower().replace("-", "_") + "_"
        ours = [row for method, some in rows.items() if method.startswith(prefix) for row in some]
        ours = [row for row in ours if row.category in measures and row.question_id in references]
        if not ours:
            continue
        cells = [str(len(ours))]
        for category, measure in measures.items():
            counts = quality_counts([row for row in ours if row.category == category], measure, references)
            value, samples = measure.of(counts.sum(axis=0)), statistic(measure.of, counts, QUALITY_RESAMPLES)
            base_value, base_samples = base.setdefault(category, (value, samples))
            (low, high), (under, over) = interval(samples), interval(samples - base_samples)
            cells += [f"{value:.1f}", f"{low:.1f} to {high:.1f}"]
            cells += [f"{value - base_value:+.1f}", f"{under:+.1f} to {over:+.1f}"] if name in ALGORITHMS else ["", ""]
        table.rows.append([name, *cells])
    return table


def quality_counts(rows: list[Row], measure: Measure, references: References) -> np.ndarray:
    """A measure's counts float64 [prompts, C], summed over each prompt's answers; prompts in the order of their ids."""
    prompts: dict[str, list[np.ndarray]] = {row.question_id: [] for row in sorted(rows, key=lambda r: r.question_id)}
    for row in rows:
        prompts[row.question_id].append(measure.counts(row.text, references[row.question_id]))
    return np.array([np.sum(counts, axis=0) for counts in prompts.values()])


def plot(figures: Figures, references: References, path: Path) -> Path:
    """The paper's figures 4 and 5: block efficiency, MBSU, token rate where it was timed, and quality where there are
    references, of the best shapes in each cell; bars are 95% intervals over prompts."""
    cells = list(figures.experiment.cells)
    timed = figures.rate(BASELINE) is not None
    scored = {row.category for rows in figures.rows.values() for row in rows if row.question_id in references}
    canvas, axes = new_figure(2 + timed + len(scored), width=3.6)
    panels = iter(axes)
    efficiency, bound = next(panels), next(panels)
    efficiency.set_ylabel("block efficiency")
    bound.set_ylabel("MBSU")
    rate = next(panels) if timed else None
    quality = {category: next(panels) for category in sorted(scored)}
    for place, (algorithm, color) in enumerate(zip(ALGORITHMS, COLORS, strict=True)):
        shift = 0.07 * (place - (len(ALGORITHMS) - 1) / 2)
        best = {at: shape for at, cell in enumerate(cells) if (shape := figures.best(cell, algorithm))}
        style: dict[str, Any] = {"color": color, "label": algorithm, "markersize": 4, "linewidth": 1.3}
        for axis, divided in ((efficiency, False), (bound, True)):
            values, spreads = list[float](), list[tuple[float, float]]()
            for shape in best.values():
                scale = figures.memory_bound(shape) if divided else 1.0
                value = figures.efficiency[shape].value / scale
                low, high = interval(figures.efficiency[shape].samples / scale)
                values.append(value)
                spreads.append((value - low, high - value))
            x = [at + shift for at in best]
            axis.errorbar(x, values, np.array(spreads).T if spreads else None, fmt="o-", elinewidth=0.8, **style)
        if rate is not None:
            fastest = {at: figures.rate(shape.method) for at, shape in best.items()}
            rate.plot(list(fastest), [value or math.nan for value in fastest.values()], "o-", **style)
        for category, axis in quality.items():
            measure = Measure.for_category(category)
            scores = [_score(figures.rows[shape.method], category, measure, references) for shape in best.values()]
            axis.plot(list(best), scores, "o-", **style)
    if rate is not None:
        rate.set_ylabel("tokens/s, one stream")
        rate.axhline(figures.rate(BASELINE) or math.nan, color="#9ca3af", linestyle=":")
    for category, axis in quality.items():
        measure = Measure.for_category(category)
        axis.set_ylabel(f"{measure.name}, {category}")
        if BASELINE in figures.rows:
            axis.axhline(_score(figures.rows[BASELINE], category, measure, references), color="#9ca3af", linestyle=":")
        axis.set_ylim(bottom=0)
    for axis in axes:
        axis.set_xticks(range(len(cells)), [str(cell) for cell in cells])
        axis.set_xlabel(figures.experiment.axis)
    axes[0].set_title(figures.title, loc="left", fontsize=10)
    handles, names = axes[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    return save(canvas, path)


def _score(rows: list[Row], category: str, measure: Measure, references: References) -> float:
    some = [row for row in rows if row.category == category and row.question_id in references]
    return measure.of(quality_counts(some, measure, references).sum(axis=0))
