"""Tables and plots of RSD's experiments from what was measured, in the layout of the paper's appendix D.4 and D.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.figures.intervals import interval, ratio, statistic
from benchmarks.figures.plots import COLORS, new_figure, save
from benchmarks.figures.tables import Table
from benchmarks.replay.acceptance import conditional_acceptance
from benchmarks.rsd.shapes import ALGORITHMS, PUBLISHED, RSD_S, Experiment, Shape
from benchmarks.rsd.store import Row, Store, sums
from benchmarks.verify.quality import Measure
from redraft.request import AUTO_REGRESSIVE

QUALITY_RESAMPLES = 400
DEPTHS = 3
References = Mapping[str, tuple[str, ...]]
"""Texts that answer a prompt as it should be, by question_id."""


@dataclass(frozen=True)
class Estimate:
    """A figure of a method at a setting, also in every re-sample of the prompts."""

    value: float
    samples: np.ndarray

    @classmethod
    def of_ratio(cls, tops: np.ndarray, bottoms: np.ndarray) -> Estimate:
        """Sum of `tops` over sum of `bottoms`, float [prompts] each."""
        return cls(float(tops.sum() / bottoms.sum()), ratio(tops, bottoms))

    def __str__(self) -> str:
        return format(self, ".2f")

    def __format__(self, spec: str) -> str:
        low, high = interval(self.samples)
        return f"{self.value:{spec}} ({low:{spec}} to {high:{spec}})"


def block_efficiency(rows: list[Row], prompts: list[str]) -> Estimate:
    """Tokens gained per step over all rows."""
    accepted, steps = sums(rows, prompts, "accepted", "steps").T
    return Estimate.of_ratio(accepted + steps, steps)


class Figures:
    """What a store holds of one experiment at one setting."""

    def __init__(self, store: Store, setting: str, experiment: Experiment):
        self.store, self.setting, self.experiment = store, setting, experiment
        self.prompts: list[str] = store.settings[setting]["prompts"]
        self.rows = store.rows.get(setting, {})
        shapes = {shape for cell in experiment.cells.values() for shape in cell if self.rows.get(shape.method)}
        self.efficiency = {shape: block_efficiency(self.rows[shape.method], self.prompts) for shape in shapes}

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

    def best(self, cell: int, algorithm: str, by: Callable[[Shape], float] | None = None) -> Shape | None:
        """The best shape of an algorithm in a cell: that of the highest block efficiency, or value of `by`."""
        shapes = [s for s in self.experiment.cells[cell] if s.algorithm == algorithm and s in self.efficiency]
        return max(shapes, key=by or (lambda shape: self.efficiency[shape].value), default=None)

    def memory_bound(self, shape: Shape) -> Estimate:
        """MBSU (appendix D.2, which prints its ratio's inverse): the speed-up where a network's time is the reading of
        its weights, with one pass of the drafter for each level."""
        ratio_of_sizes = self.store.setup["draft_parameters"] / self.store.setup["target_parameters"]
        scale, efficiency = 1 / (1 + shape.length * ratio_of_sizes), self.efficiency[shape]
        return Estimate(scale * efficiency.value, scale * efficiency.samples)

    def rate(self, method: str) -> Estimate | None:
        """Tokens per second of a single stream after its first token; None where it was not timed."""
        timed = self.store.timing.get(self.setting, {}).get(method)
        return Estimate.of_ratio(*np.array(list(timed.values())).T) if timed else None

    def speedup(self, method: str) -> Estimate | None:
        """The token rate over auto-regressive decoding's, on the prompts that both were timed on."""
        timing = self.store.timing.get(self.setting, {})
        ours, base = timing.get(method, {}), timing.get(AUTO_REGRESSIVE, {})
        if not (common := sorted(ours.keys() & base.keys())):
            return None
        fast, slow = (Estimate.of_ratio(*np.array([part[key] for key in common]).T) for part in (ours, base))
        return Estimate(fast.value / slow.value, fast.samples / slow.samples)


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
    columns = ["", "method", "tree", "nodes", "block efficiency", *depths, "MBSU", "tokens/s", "speed-up"]
    table = Table(f"{figures.title}: all shapes", columns)
    for cell, shape in figures.measured():
        rate, speedup = figures.rate(shape.method), figures.speedup(shape.method)
        table.rows.append(
            [
                str(cell), shape.algorithm, shape.spec, str(shape.nodes), str(figures.efficiency[shape]),
                *_first_depths(figures.rows[shape.method]), str(figures.memory_bound(shape)),
                format(rate, ".0f") if rate else "-", str(speedup or "-"),
            ]
        )  # fmt: skip
    return table


def _first_depths(rows: list[Row]) -> list[str]:
    """Conditional acceptance rates at the first depths."""
    accepted = [
        sum(row.accepted_by_depth[depth] for row in rows if depth < len(row.accepted_by_depth))
        for depth in range(DEPTHS)
    ]
    counts = conditional_acceptance(sum(row.steps for row in rows), accepted)
    return [f"{ours / before:.2f}" if ours else "-" for ours, before in counts]


def quality_table(store: Store, setting: str, references: References) -> Table | None:
    """BLEU or ROUGE-2 by task, all shapes of an algorithm together, and the difference to auto-regressive sampling;
    None without references."""
    rows = store.rows.get(setting, {})
    categories = sorted({row.category for row in rows.get(AUTO_REGRESSIVE, []) if row.question_id in references})
    if not categories:
        return None
    measures = {category: Measure.for_category(category) for category in categories}
    heads = [head for c, m in measures.items() for head in (f"{m.name}, {c}", "95%", "less auto-regressive", "95%")]
    filters = "".join(f", {name.replace('_', '-')} {v:g}" for name, v in store.settings[setting]["sampling"].items())
    table = Table(f"Quality against references{filters}: all shapes together", ["", "answers", *heads])
    base: dict[str, tuple[float, np.ndarray]] = {}
    for name in ("auto-regressive", *ALGORITHMS):
        prefix = AUTO_REGRESSIVE if name == "auto-regressive" else name.lower().replace("-", "_") + "_"
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


@dataclass(frozen=True)
class Panel:
    """A plot's panel: `point(cell, algorithm)` gives a value and its interval, None where nothing was measured."""

    label: str
    point: Callable[[int, str], tuple[float, float, float] | None]
    baseline: float | None = None
    """Auto-regressive decoding's value."""
    from_zero: bool = False


def plot(figures: Figures, references: References, path: Path) -> Path:
    """The paper's figures 4 and 5: block efficiency, MBSU and, where it was timed, token rate of each cell's best
    shapes; quality of all of a cell's shapes together. Bars are 95% intervals over prompts."""
    panels = list(_panels(figures, references))
    canvas, axes = new_figure(len(panels), width=3.4)
    cells = list(figures.experiment.cells)
    for panel, axis in zip(panels, axes, strict=True):
        for place, (algorithm, color) in enumerate(zip(ALGORITHMS, COLORS, strict=False)):
            shift = 0.07 * (place - (len(ALGORITHMS) - 1) / 2)
            points = {at + shift: point for at, cell in enumerate(cells) if (point := panel.point(cell, algorithm))}
            values, lows, highs = np.array(list(points.values())).reshape(-1, 3).T
            bars = (values - lows, highs - values)
            axis.errorbar(
                list(points), values, bars, fmt="o-", color=color, label=algorithm, markersize=4, linewidth=1.3,
                elinewidth=0.8,
            )  # fmt: skip
        if panel.baseline is not None:
            axis.axhline(panel.baseline, color="#9ca3af", linestyle=":", label="auto-regressive")
        if panel.from_zero:
            axis.set_ylim(bottom=0)
        axis.set_xticks(range(len(cells)), [str(cell) for cell in cells])
        axis.set_xlabel(figures.experiment.axis)
        axis.set_title(panel.label, loc="left", fontsize=10)
    canvas.suptitle(figures.title, x=0.01, ha="left", fontsize=11)
    handles, names = axes[-1].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    return save(canvas, path)


def _panels(figures: Figures, references: References) -> Iterator[Panel]:
    def efficiency(cell: int, algorithm: str) -> tuple[float, float, float] | None:
        shape = figures.best(cell, algorithm)
        return (figures.efficiency[shape].value, *interval(figures.efficiency[shape].samples)) if shape else None

    def bound(cell: int, algorithm: str) -> tuple[float, float, float] | None:
        shape = figures.best(cell, algorithm, lambda shape: figures.memory_bound(shape).value)
        if shape is None:
            return None
        bound = figures.memory_bound(shape)
        return bound.value, *interval(bound.samples)

    def rate(cell: int, algorithm: str) -> tuple[float, float, float] | None:
        timed = [
            estimate
            for shape in figures.experiment.cells[cell]
            if shape.algorithm == algorithm and (estimate := figures.rate(shape.method))
        ]
        best = max(timed, key=lambda estimate: estimate.value, default=None)
        return (best.value, *interval(best.samples)) if best else None

    yield Panel("block efficiency", efficiency)
    yield Panel("MBSU", bound)
    if (base := figures.rate(AUTO_REGRESSIVE)) is not None:
        yield Panel("tokens/s, one stream", rate, base.value)
    scored = {row.category for rows in figures.rows.values() for row in rows if row.question_id in references}
    for category in sorted(scored):
        measure = Measure.for_category(category)

        def quality(cell: int, algorithm: str, category: str = category) -> tuple[float, float, float] | None:
            shapes = [shape for shape in figures.experiment.cells[cell] if shape.algorithm == algorithm]
            return _score([row for shape in shapes for row in figures.rows.get(shape.method, [])], category, references)

        base_score = _score(figures.rows.get(AUTO_REGRESSIVE, []), category, references)
        yield Panel(f"{measure.name}, {category}", quality, base_score[0] if base_score else None, from_zero=True)


def _score(rows: list[Row], category: str, references: References) -> tuple[float, float, float] | None:
    some = [row for row in rows if row.category == category and row.question_id in references]
    if not some:
        return None
    measure = Measure.for_category(category)
    counts = quality_counts(some, measure, references)
    return measure.of(counts.sum(axis=0)), *interval(statistic(measure.of, counts, QUALITY_RESAMPLES))
