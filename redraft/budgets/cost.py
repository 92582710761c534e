"""The cost of a step: seconds by rows and running sequences, from a table that is corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass as plain_dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

RATE = 0.05
"""Weight of a new value in a running mean."""
WARM_UP = 5
"""First values of a running mean, of which the least counts: whatever is slow the first time is not slow for ever."""
MOST_APART = 1.25
"""A value that is larger or smaller than expected by more than this factor counts as if by this factor."""
LASTING = 6
"""Values in a row that are so far off on the same side are no outliers: the mean moves to them. Fewer may be a burst of
other programs, after which the drafter of a machine would be known for slow until probes say otherwise."""
NEAR = 0.5
"""From this share on a step's time is that of a row count of a table: see `TimeTable.correct`."""
FIRST_RATE = 0.5
"""`RATE` of the first slower steps there."""
UNKNOWN_SHARE = 0.3
"""What is taken for the drafter's and the host's time before any was seen, as a share of the target's."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Load = Annotated[str, Field(pattern=r"^\d+p?$")]
"""See `StepShape.load`."""
DraftsAtLoad = Annotated[str, Field(pattern=r":\d+p?$")]
"""Methods and a load, with a colon between them."""


@plain_dataclass
class StepShape:
    """What a step's time depends on."""

    running: int
    """Sequences that decode."""
    prompts: int = 0
    """Sequences whose prompts it takes rows of."""
    prompt_rows: int = 0

    @property
    def load(self) -> str:
        """The class of its load: 1, 2, 3 to 4, 5 to 8, ... sequences, those with prompt rows apart."""
        return f"{max(self.running - 1, 0).bit_length()}{'p' if self.prompt_rows else ''}"


@dataclass(config=STRICT, kw_only=True)
class RunningMean:
    """A mean of the last 20 values or so, which single outliers move little."""

    value: float = Field(default=0.0, ge=0)
    count: int = Field(default=0, ge=0)
    apart: int = 0
    """Last values in a row that were larger than expected by more than MOST_APART; negative: smaller."""

    def add(self, value: float) -> None:
        """Count a value."""
        if self.count < WARM_UP:
            self.value = min(value, self.value) if self.count else value
        else:
            least, most = self.value / MOST_APART, self.value * MOST_APART
            side = (value > most) - (value < least)
            self.apart = side and side * max(side * self.apart + 1, 1)
            # A machine or a drafter that has become slower for good would else be known for it after a hundred steps.
            lasts = abs(self.apart) >= LASTING
            value = value if lasts else min(max(value, least), most)
            self.value += (1 / LASTING if lasts else RATE) * (value - self.value)
        self.count += 1


@dataclass(config=STRICT, kw_only=True)
class TimeTable:
    """Seconds of the target's steps of up to `sequences` sequences, at some row counts in ascending order."""

    sequences: int = Field(ge=1)
    rows: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    seconds: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)
    padded: bool
    """Whether steps are padded to these row counts, so that a step takes the time of the next larger one. Else the
    time is linear in between."""

    def __post_init__(self) -> None:
        """Raise ValueError unless each row count has its seconds, and the counts ascend."""
        self._doubted = [0] * len(self.rows)
        if len(self.rows) != len(self.seconds) or any(count >= more for count, more in pairwise(self.rows)):
            raise ValueError(
                f"a table of {self.rows} rows and {len(self.seconds)} times: expected ascending rows, a time each"
            )

    def at(self, rows: int) -> float:
        """Seconds of a step with `rows` rows: never less than with fewer, and after the last count in proportion."""
        above = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        seconds = max(self.seconds[: above + 1])
        if not self.padded and above > 0 and rows < self.rows[above]:
            less, low = max(self.seconds[:above]), self.rows[above - 1]
            seconds = less + (seconds - less) * (rows - low) / (self.rows[above] - low)
        return seconds * max(rows / self.rows[-1], 1.0)

    def doubt(self) -> None:
        """Let the first steps near each row count move it further: other programs started while it was timed."""
        self._doubted = [WARM_UP] * len(self.rows)

    def correct(self, rows: int, ratio: float) -> None:
        """Move the seconds at the nearest row counts by `ratio`, the time that a step of `rows` rows took over what was
        expected of it."""
        above = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        below, share = max(above - 1, 0), 1.0
        if not self.padded and above > below:
            share = min((rows - self.rows[below]) / (self.rows[above] - self.rows[below]), 1.0)
            self._move(below, 1 - share, ratio)
        self._move(above, share, ratio)

    def _move(self, index: int, share: float, ratio: float) -> None:
        ratio = min(ratio, MOST_APART)  # after one delayed step a row count would be avoided, and never learned again
        if share >= NEAR and self._doubted[index]:
            self._doubted[index] -= 1
            rate = 1.0 if ratio < 1 else FIRST_RATE
        else:
            ratio, rate = max(ratio, 1 / MOST_APART), RATE * share
        # `at` may have given the time of fewer rows, which then was too long as well.
        moved = self.at(self.rows[index]) * (1 + rate * (ratio - 1))
        self.seconds[:index] = [min(seconds, moved) for seconds in self.seconds[:index]]
        self.seconds[index] = moved


class TimesByNodes(NamedTuple):
    """Seconds of a step by how many nodes it verifies."""

    table: TimeTable
    rows: int
    """The others."""
    factor: float
    """On the table's seconds."""
    more_s: float
    """What the step takes beside them."""

    def at(self, nodes: int) -> float:
        """Seconds with so many nodes."""
        return self.table.at(self.rows + nodes) * self.factor + self.more_s


@dataclass(config=STRICT, kw_only=True)
class StepCosts:
    """A step's time in two parts. The target's comes from tables by rows, times a factor of the step's load, which
    holds what cached rows and a busy machine add. The drafters' and the host's is a mean by load and by what
    drafts."""

    tables: list[TimeTable] = Field(min_length=1)
    """By ascending number of sequences."""
    factors: dict[Load, RunningMean] = Field(default_factory=dict)
    """By `StepShape.load`."""
    others: dict[DraftsAtLoad, RunningMean] = Field(default_factory=dict)
    """Seconds of drafters and host by what drafts, methods joined by +, and the step's load."""
    error: float = 0.0
    """Running mean of how far predictions were from what steps took, as a share of it."""

    @property
    def steps(self) -> int:
        """Steps that they have been corrected by."""
        return sum(mean.count for mean in self.factors.values())

    def of(self, shape: StepShape) -> ShapeCosts:
        """The costs of steps of a shape."""
        return ShapeCosts(self, shape)


class ShapeCosts:
    """The costs of steps of one shape, whose table and factor are looked up once: valid until a step corrects them."""

    def __init__(self, costs: StepCosts, shape: StepShape):
        self._costs, self._shape, self.load = costs, shape, shape.load
        sequences = shape.running + shape.prompts
        self._table = next((table for table in costs.tables if table.sequences >= sequences), costs.tables[-1])
        self._factor = _nearest(costs.factors, "", self.load, 1.0)

    @property
    def roots_s(self) -> float:
        """Seconds of the target with a row of each sequence that decodes."""
        return self.target(self._shape.running)

    @property
    def prompts_s(self) -> float:
        """Seconds of the prompts' rows: they pass whatever is drafted, and no draft makes them fewer."""
        rows = self._shape.prompt_rows
        return self.target(self._shape.running + rows) - self.roots_s if rows else 0.0

    def target(self, rows: int) -> float:
        """Seconds of the target with `rows` rows, those of prompts included."""
        return self._table.at(rows) * self._factor

    def other(self, drafting: str) -> float:
        """Seconds of the drafters and the host where these methods draft; "": of the host."""
        key, others = f"{drafting}:", self._costs.others
        if mean := others.get(key + self.load):
            return mean.value
        return _nearest(others, key, self.load, UNKNOWN_SHARE * self.roots_s if drafting else 0.0)

    def step(self, rows: int, drafting: str) -> float:
        """Seconds of a whole step with `rows` rows, those of prompts included."""
        return self.target(rows) + self.other(drafting)

    def by_nodes(self, rows: int, drafting: str) -> TimesByNodes:
        """Seconds of whole steps, prompts apart, by the nodes that they have beside `rows` other rows."""
        return TimesByNodes(self._table, rows, self._factor, self.other(drafting) - self.prompts_s)

    def observe(self, rows: int, drafting: str, step_s: float, target_s: float) -> float:
        """Correct the estimates by a step, which took `step_s`, of which `target_s` in the target. Returns what it
        should have taken."""
        costs, timed_s = self._costs, self._table.at(rows)
        expected = timed_s * self._factor + self.other(drafting)
        costs.error += RATE * (min(abs(expected / step_s - 1), 1.0) - costs.error)
        factor = _mean(costs.factors, self.load)
        factor.add(target_s / timed_s)
        if not self._shape.prompt_rows:  # prompt rows cost other times, as few of them have logits
            self._table.correct(rows, target_s / (timed_s * factor.value))
        _mean(costs.others, f"{drafting}:{self.load}").add(step_s - target_s)
        return expected


def _mean(means: dict[str, RunningMean], key: str) -> RunningMean:
    if key not in means:
        means[key] = RunningMean()
    return means[key]


def _nearest(means: dict[str, RunningMean], prefix: str, load: str, default: float) -> float:
    """The mean of a load, or else of the nearest load that was seen; prompts stand for prompts first."""
    if mean := means.get(prefix + load):
        return mean.value
    number, prompts = int(load.rstrip("p")), load.endswith("p")
    seen = [key for key in means if key.startswith(prefix) and ":" not in key[len(prefix) :]]
    if not seen:
        return default

    def distance(key: str) -> tuple[bool, int]:
        other = key[len(prefix) :]
        return other.endswith("p") is not prompts, abs(int(other.rstrip("p")) - number)

    return means[min(seen, key=distance)].value
