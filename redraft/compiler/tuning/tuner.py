"""Tuning of one method within a time: the most valuable measurements first, as many as fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.compiler.tuning.acceptance import Acceptance, CutAcceptance, Gains
from redraft.compiler.tuning.choice import CHANCES, LEAST_GAIN, NOTHING, Cell, StepTimes, choose
from redraft.compiler.tuning.measure import MOST_SLOWER, Bench, TreeShape
from redraft.compiler.tuning.scores import reliability

MARGIN = 0.15
"""Least expected gain of a method with a drafter network. Prefill, which drafts do not speed up, and harder prompts
than the tuner's leave less of a gain than it expects."""
MARGIN_OF_NGRAMS = 0.03
"""The same without a network, whose drafts are short or none where prompts are hard."""
MEASURING = 0.75
"""Share of the time for measurements; the rest is for trials of the budgets that they give."""
FITTING = 0.25
"""Share of the measurements' time that fitting scores may take: a slow model would spend all of it there, and draft
nothing at loads whose steps nobody timed."""
BATCHES = 4
"""Parts of the prompts that acceptance is measured on one after the other."""
FIRST_ROUNDS = 4
"""Times that each step is measured at once."""
TRIED, TRIAL_TOKENS = 6, 24
"""Prompts of a trial at least, and tokens that follow each."""

Measure = Callable[[], None]
Cells = dict[float, dict[int, Cell]]
"""Cuts of the trees by temperature and number of running sequences."""
Say = Callable[["Tuner", str], None]


@dataclass(frozen=True)
class Grid:
    """What is measured where there is time for all of it."""

    budgets: Sequence[int] = (0, 1, 2, 3, 4, 6, 8, 11, 15, 19, 23, 31, 47, 63)
    """With the root mostly a multiple of 4 rows, which the CPU operators take at a time."""
    running: Sequence[int] = (1, 2, 3, 4, 6, 8, 16, 32)
    shapes: Sequence[TreeShape] = (
        TreeShape("best_first", True),
        TreeShape("best_first", False),
        TreeShape("beam", True),
        TreeShape("beam", False),
    )
    """What a method of the first, the default, is tried with; any other method keeps its own."""
    rounds: int = 8
    """Times that each step is measured."""
    temperatures: Sequence[tuple[float, int]] = ((0.0, 1), (1.0, 1), (0.7, 2), (0.3, 2))
    """The most valuable first, each with every how many parts of the prompts it is measured on. All share the step
    times."""


GRID = Grid()


class Tuner:
    """Measures a method on a bench and chooses its budgets."""

    def __init__(self, bench: Bench, seconds: float, grid: Grid = GRID, say: Say = lambda *_: None):
        """`say` is called before each measurement with what is under way."""
        limits, plan = bench.runtime.limits, bench.runtime.methods[bench.method]
        self.bench = bench
        self.done, self.of = 0, 0
        """Measurements made, and those that there are where time allows."""
        self.ends = time.monotonic() + seconds
        bench.ends = self.ends - (1 - MEASURING) * seconds
        self._fitting_s = FITTING * MEASURING * seconds
        self._say = say
        shape = TreeShape(plan.construction, plan.ngram)
        self._random = plan.shape is not None
        self._network = plan.construction is not None and not plan.retrieves
        self._fits = plan.shares_noise or plan.ngram or plan.retrieves
        self._shapes = list(grid.shapes) if shape == grid.shapes[0] else [shape]
        self._budgets = [budget for budget in grid.budgets if budget < limits.max_tree]
        if plan.shape is not None and not plan.ngram:
            draws = sum(plan.shape.widths)
            self._budgets = [budget for budget in self._budgets if budget < draws] + [draws]
        counts = {count for count in grid.running if count < limits.slots} | {limits.slots}
        self._counts = sorted(counts, key=lambda count: (count not in (1, limits.slots), count & (count - 1), count))
        self._rounds = grid.rounds
        self._temperatures = dict(grid.temperatures)
        self._batches = [part for first in range(BATCHES) if (part := bench.prompts[first::BATCHES])]
        self._times: dict[int, StepTimes] = {}
        self._accepted: dict[TreeShape, dict[float, Gains]] = {}
        self._not_tried: set[tuple[float, int]] = set()
        """Temperatures and loads whose budgets promised a gain, and for whose trials there was no time."""

    def tune(self) -> BudgetTable:
        """The method's budget table."""
        plan = list(self._measurements())
        self.of = len(plan) + len(self._temperatures) * len(self._counts)
        for required, what, measure in plan:
            if not required and time.monotonic() > self.bench.ends:
                continue
            self._say(self, what)
            measure()
            self.done += 1
        candidates = [(shape, self._cells(shape)) for shape in self._accepted]
        shape, cells = max(candidates, key=lambda pair: _score(pair[1]))
        tried = self._try(shape, cells)
        return BudgetTable(
            entries=[
                BudgetEntry(running=running, temperature=temperature, nodes=cell.nodes, chance=cell.chance)
                for temperature, by_running in sorted(cells.items())
                for running, cell in sorted(by_running.items())
            ],
            scores=tuple(sorted(self.bench.scores, key=lambda score: score.temperature)),
            construction=shape.construction,
            ngram=shape.ngram,
            measured=self._measured(shape, cells, tried),
        )

    def _measurements(self) -> Iterator[tuple[bool, str, Measure]]:
        """All measurements, the most valuable first: whether it is required, what it is, and how it is made."""
        for n in self._counts[:2]:
            yield True, f"step times of {n} running", self._steps(n, FIRST_ROUNDS)
        if self._fits:
            yield from ((False, f"scores at {_key(t)}", self._fit(t)) for t in self._temperatures if t)
        for index, batch in enumerate(self._batches):
            for temperature in (t for t, apart in self._temperatures.items() if index % apart == 0):
                part = f"part {index + 1} of {len(self._batches)}"
                what = f"acceptance of {self._shapes[0]} at {_key(temperature)}, {part}"
                yield index == 0, what, self._acceptance(self._shapes[0], temperature, batch)
            if index == 0:
                yield from (
                    (False, f"step times of {n} running", self._steps(n, FIRST_ROUNDS)) for n in self._counts[2:]
                )
        for _ in range(FIRST_ROUNDS, self._rounds):
            yield from ((False, f"step times of {n} running again", self._steps(n, 1)) for n in self._counts)
        for shape in self._shapes[1:]:
            yield False, f"acceptance of {shape}", self._whole(shape)

    def _steps(self, running: int, rounds: int) -> Measure:
        def measure() -> None:
            times = self._times.setdefault(running, StepTimes(network=self._network))
            self.bench.step_times(self._shapes[0], running, self._budgets, rounds, times)

        return measure

    def _fit(self, temperature: float) -> Measure:
        """A fit to fewer answers, or none, where the fits' time is over: the scores then stay as they are."""

        def measure() -> None:
            started, ends = time.monotonic(), self.bench.ends
            if self._fitting_s <= 0:
                return
            self.bench.ends = min(ends, started + self._fitting_s)
            self.bench.fit(self._shapes[0], temperature, self._largest)
            self.bench.ends, self._fitting_s = ends, self._fitting_s - (time.monotonic() - started)

        return measure

    def _acceptance(self, shape: TreeShape, temperature: float, prompts: Sequence[list[int]]) -> Measure:
        def measure() -> None:
            by_temperature = self._accepted.setdefault(shape, {})
            if not self._random:
                acceptance = by_temperature.setdefault(temperature, Acceptance())
                assert isinstance(acceptance, Acceptance)
                self.bench.acceptance(shape, temperature, self._largest, acceptance, prompts)
                return
            cuts = by_temperature.setdefault(
                temperature, CutAcceptance({budget: Acceptance() for budget in self._budgets})
            )
            assert isinstance(cuts, CutAcceptance)
            for budget in self._budgets[1:]:
                self.bench.acceptance(shape, temperature, budget, cuts.by_budget[budget], prompts)

        return measure

    def _whole(self, shape: TreeShape) -> Measure:
        """Acceptance of another shape on as much as that of the first was measured on; of none where the time ends:
        that of a few prompts would be compared with that of all."""

        def measure() -> None:
            for temperature, apart in self._temperatures.items():
                prompts = [prompt for part in self._batches[::apart] for prompt in part]
                self._acceptance(shape, temperature, prompts)()
            if time.monotonic() > self.bench.ends:
                del self._accepted[shape]

        return measure

    @property
    def _largest(self) -> int:
        """The largest budget that may pay by the time of its step."""
        times = self._times[1]
        return max(b for b in times.samples if times.measured(b)[1] <= MOST_SLOWER * times.plain)

    def _cells(self, shape: TreeShape) -> Cells:
        """The cut of the trees, by temperature and number of running sequences."""
        margin = MARGIN if self._network else MARGIN_OF_NGRAMS
        budgets = self._budgets if self._random else [budget for budget in self._budgets if budget <= self._largest]
        chances = (0.0,) if self._random else CHANCES
        return {
            temperature: choose(self._times, gains, budgets, chances, margin)
            for temperature, gains in self._accepted[shape].items()
        }

    def _try(self, shape: TreeShape, cells: Cells) -> dict[str, dict[str, float]]:
        """Run the chosen cuts beside no drafting, as far as there is time, and drop those that do not pay. A sampled
        one is not run where that of the next higher temperature paid, which accepts less. A load that was not tried
        takes the cut of the next larger one that was. Returns the speed-ups that were measured."""
        tried: dict[str, dict[str, float]] = {}
        paid: dict[float, set[int]] = {temperature: set() for temperature in cells}
        for running in filter(self._times.__contains__, self._counts):
            for temperature, by_running in cells.items():
                cell = by_running[running]
                higher = min((other for other in cells if other > temperature > 0), default=None)
                is_paid = higher is not None and running in paid[higher]
                if is_paid and cell.nodes:
                    paid[temperature].add(running)
                if is_paid or not cell.nodes:
                    self.of -= 1
                    continue
                if time.monotonic() > self.ends and tried:
                    self._not_tried.add((temperature, running))
                    continue
                self._say(self, f"trying {cell.nodes} nodes with {running} running, temperature {_key(temperature)}")
                speed_up = self._speed_up(shape, running, temperature, cell)
                tried.setdefault(str(running), {})[_key(temperature)] = round(speed_up, 3)
                if speed_up < 1 + LEAST_GAIN:
                    by_running |= {n: NOTHING for n in by_running if n >= running}
                else:
                    paid[temperature].add(running)
                self.done += 1
        for temperature, by_running in cells.items():
            above = NOTHING
            for running in sorted(by_running, reverse=True):
                if running not in paid[temperature]:
                    by_running[running] = NOTHING if _key(temperature) in tried.get(str(running), {}) else above
                above = by_running[running]
        return tried

    def _speed_up(self, shape: TreeShape, running: int, temperature: float, cell: Cell) -> float:
        """The speed-up by the mean times of steps with and without drafts, in turns; 1 where none could be timed."""
        texts = -(-TRIED // running) * running
        prompts = [self.bench.prompts[index % len(self.bench.prompts)] for index in range(texts)]
        plain = drafted = 0.0
        for first in range(0, texts, running):
            group = prompts[first : first + running]
            plain += self.bench.mean_step(shape, group, temperature, NOTHING, TRIAL_TOKENS)
            drafted += self.bench.mean_step(shape, group, temperature, cell, TRIAL_TOKENS)
        if not drafted:
            return 1.0
        return self._accepted[shape][temperature].expect(cell.nodes, cell.chance, running).tokens * plain / drafted

    def _measured(self, shape: TreeShape, cells: Cells, tried: dict[str, dict[str, float]]) -> dict:
        """What the table rests on; temperatures are keys as `_key` writes them."""
        times = {
            str(running): {
                str(budget): round(1e3 * samples.measured(budget)[1], 3) for budget in sorted(samples.samples)
            }
            for running, samples in sorted(self._times.items())
        }
        lengths = {
            str(shape): {
                _key(temperature): {str(n): round(gains.expect(n, 0.0, 1).tokens, 3) for n in self._budgets}
                for temperature, gains in by_temperature.items()
            }
            for shape, by_temperature in self._accepted.items()
        }
        chosen = {
            str(running): {
                _key(temperature): round(gains.expect(cell.nodes, cell.chance, running).tokens, 3)
                for temperature, gains in self._accepted[shape].items()
                if (cell := cells[temperature][running])
            }
            for running in sorted(self._times)
        }
        speed_up = {
            str(running): {
                _key(temperature): round(by_running[running].speed_up, 3) for temperature, by_running in cells.items()
            }
            for running in sorted(self._times)
        }
        curves = {
            _key(temperature): reliability(gains.steps)
            for temperature, gains in self._accepted[shape].items()
            if isinstance(gains, Acceptance)
        }
        return {
            "step_ms": times,
            "acceptance": lengths,
            "tokens_per_step": chosen,
            "speed_up": speed_up,
            "reliability": curves,
            "tried": tried,
            "measurements": {"done": self.done, "of": self.of},
            "not_timed": sorted({*self._counts} - self._times.keys()),
            "not_tried": {
                _key(temperature): loads
                for temperature, by_running in sorted(cells.items())
                if (
                    loads := [
                        n for n in sorted(by_running) if (temperature, n) in self._not_tried and not by_running[n].nodes
                    ]
                )
            },
        }


def _key(temperature: float) -> str:
    """A temperature as it stands in what was measured: 0, 0.7, ..."""
    return f"{temperature:g}"


def _score(cells: Cells) -> float:
    """How fast a shape is over all loads."""
    return float(np.mean([np.log(cell.speed_up) for by_running in cells.values() for cell in by_running.values()]))
