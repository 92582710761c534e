"""Budgets from step times and expected gains: drafting only where it is expected to pay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from redraft.compiler.tuning.acceptance import Gains

CHANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Least chances of drafted nodes that are considered."""
SURE = 1.64
"""Standard errors below the expected gain that must still pay: 95% on one side."""
LEAST_GAIN = 0.02
"""What is gained there at least."""


@dataclass
class StepTimes:
    """Measured times of whole steps of some number of running sequences."""

    samples: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Rows and seconds of each step, by budget."""
    network: bool = True
    """Whether a network drafts, whose time a step takes however few rows it has."""

    def add(self, budget: int, rows: float, seconds: float) -> None:
        """Add a step."""
        self.samples.setdefault(budget, []).append((rows, seconds))

    @property
    def plain(self) -> float:
        """Seconds of a step that drafts nothing."""
        return self.measured(0)[1]

    def measured(self, budget: int) -> tuple[float, float]:
        """Mean rows of the steps with a budget, and mean seconds of the faster half of them: whatever else runs on a
        machine makes a step slower, never faster."""
        rows, seconds = zip(*self.samples[budget], strict=True)
        return float(np.mean(rows)), float(np.mean(sorted(seconds)[: (len(seconds) + 1) // 2]))

    def fastest(self, budget: int) -> float:
        """Seconds of the fastest step with a budget."""
        return min(seconds for _, seconds in self.samples[budget])

    def seconds(self, rows: float) -> float:
        """Time of a step with drafts that executes so many rows: linear between the budgets measured, never less than
        for fewer rows, and for more rows than any as if each row cost its share of the largest."""
        counted = [budget for budget in self.samples if budget or not self.network]
        points = sorted((*self.measured(budget), len(self.samples[budget])) for budget in counted)
        measured, times, weights = (np.array(column) for column in zip(*points, strict=True))
        return float(np.interp(rows, measured, monotone(times, weights))) * max(rows / measured[-1], 1.0)


def monotone(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values that never fall, by weighted squares: falling neighbours take their mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            above, more, indices = blocks.pop()
            mean, total, count = (mean * total + above * more) / (total + more), total + more, count + indices
        blocks.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


@dataclass(frozen=True)
class Cell:
    """What is drafted with some number of running sequences, and the speed-up over no drafting that it should bring."""

    nodes: int
    chance: float
    speed_up: float


NOTHING = Cell(0, 0.0, 1.0)


def choose(
    times: Mapping[int, StepTimes], gains: Gains, budgets: Iterable[int], chances: Iterable[float], margin: float
) -> dict[int, Cell]:
    """The fastest cut of the trees by the number of running sequences, its nodes never growing with load. Nothing is
    drafted where the expected gain is less than `margin`, or could be less than LEAST_GAIN by chance."""
    budgets, chances, cells = sorted(budgets), tuple(chances), {}
    for running, measured in sorted(times.items()):
        best, least = NOTHING, 1.0
        for nodes in filter(None, budgets):
            for chance in chances:
                gain = gains.expect(nodes, chance, running)
                ratio = measured.plain / measured.seconds(running * gain.rows)
                if (speed_up := gain.tokens * ratio) > best.speed_up:
                    best, least = Cell(nodes, chance, speed_up), (gain.tokens - SURE * gain.error) * ratio
        pays = best.speed_up >= 1 + margin and least >= 1 + LEAST_GAIN
        cells[running] = best if pays else NOTHING
        budgets = [nodes for nodes in budgets if nodes <= cells[running].nodes]
    return cells
