"""RSD's figures from what was measured, as the JSON that tables and plots are made of (`studies.rsd.report`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speed.acceptance import conditional_acceptance
from redraft.loadtest.intervals import interval, ratio
from redraft.request import AUTO_REGRESSIVE
from studies.rsd.shapes import ALGORITHMS, PUBLISHED, RSD_S, Experiment, Shape
from studies.rsd.store import Row, Store, sums

DEPTHS = 3


@dataclass(frozen=True)
class Estimate:
    """A figure of a method at a setting, also in every re-sample of the prompts."""

    value: float
    samples: np.ndarray

    @classmethod
    def of_ratio(cls, tops: np.ndarray, bottoms: np.ndarray) -> Estimate:
        """Sum of `tops` over sum of `bottoms`, float [prompts] each."""
        return cls(float(tops.sum() / bottoms.sum()), ratio(tops, bottoms))

    def json(self) -> dict[str, Any]:
        """Value and 95% interval."""
        return {"value": self.value, "interval": list(interval(self.samples))}


def block_efficiency(rows: list[Row], prompts: list[str]) -> Estimate:
    """Tokens per step over all rows."""
    accepted, steps = sums(rows, prompts, "accepted", "steps").T
    return Estimate.of_ratio(accepted + steps, steps)


class Figures:
    """Figures of one experiment at one setting of a store."""

    def __init__(self, store: Store, setting: str, experiment: Experiment):
        self.store, self.setting, self.experiment = store, setting, experiment
        self.prompts: list[str] = store.settings[setting]["prompts"]
        self.rows = store.rows.get(setting, {})
        shapes = {shape for cell in experiment.cells.values() for shape in cell if self.rows.get(shape.method)}
        self.efficiency = {shape: block_efficiency(self.rows[shape.method], self.prompts) for shape in shapes}

    def measured(self) -> Iterator[tuple[int, Shape]]:
        """Cells and their shapes that have been measured."""
        for cell, shapes in self.experiment.cells.items():
            yield from ((cell, shape) for shape in shapes if shape in self.efficiency)

    def best(self, cell: int) -> dict[str, Shape]:
        """The shape of the highest block efficiency of each algorithm in a cell, where one was measured."""
        result = {}
        for name in ALGORITHMS:
            shapes = [s for s in self.experiment.cells[cell] if s.algorithm == name and s in self.efficiency]
            if shapes:
                result[name] = max(shapes, key=lambda shape: self.efficiency[shape].value)
        return result

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

    def lead(self, cell: int) -> dict[str, Any] | None:
        """RSD-S's lead over the best other algorithm of the paper in a cell, with its interval."""
        best = self.best(cell)
        others = [self.efficiency[best[name]] for name in PUBLISHED if name != RSD_S and name in best]
        if RSD_S not in best or not others:
            return None
        ours, other = self.efficiency[best[RSD_S]], max(others, key=lambda estimate: estimate.value)
        return Estimate(ours.value - other.value, ours.samples - other.samples).json()

    def json(self) -> dict[str, Any]:
        """All figures: every shape, the best ones of each cell, and the lead of RSD-S."""
        cells = dict.fromkeys(cell for cell, _ in self.measured())
        return {
            "experiment": self.experiment.name,
            "title": self.experiment.title,
            "sampling": self.store.settings[self.setting]["sampling"],
            "axis": self.experiment.axis,
            "best": {str(cell): {name: shape.spec for name, shape in self.best(cell).items()} for cell in cells},
            "lead": {str(cell): self.lead(cell) for cell in cells},
            "shapes": [self._shape(cell, shape) for cell, shape in self.measured()],
        }

    def _shape(self, cell: int, shape: Shape) -> dict[str, Any]:
        rate, speedup = self.rate(shape.method), self.speedup(shape.method)
        return {
            "cell": cell,
            "method": shape.algorithm,
            "tree": shape.spec,
            "nodes": shape.nodes,
            "block_efficiency": self.efficiency[shape].json(),
            "conditional_acceptance": first_depths(self.rows[shape.method]),
            "mbsu": self.memory_bound(shape).json(),
            "tokens_per_s": rate.json() if rate else None,
            "speedup": speedup.json() if speedup else None,
        }


def first_depths(rows: list[Row]) -> list[float]:
    """Conditional acceptance rates at the first depths that were accepted at all."""
    accepted = [
        sum(row.accepted_by_depth[depth] for row in rows if depth < len(row.accepted_by_depth))
        for depth in range(DEPTHS)
    ]
    counts = conditional_acceptance(sum(row.steps for row in rows), accepted)
    return [ours / before for ours, before in counts if ours]


def published(store: Store, experiments: list[Experiment]) -> dict[str, Any]:
    """All figures of a store, as docs/results/rsd/experiments.json has them."""
    parts = [Figures(store, setting, experiment) for setting in store.settings for experiment in experiments]
    return {
        **store.setup,
        "prompts": {setting: len(part["prompts"]) for setting, part in store.settings.items()},
        "experiments": [figures.json() for figures in parts if figures.efficiency],
    }
