"""A null engine on a virtual clock: steps take what a machine's tables say, drafts are accepted as a source says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from redraft.budgets.choice import choose_nodes
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, StepShape, TimeTable
from redraft.budgets.gain import Calibration, bands_of
from redraft.decoding.token_tree import TokenTree

METHOD = "drafter"
WINDOW_S, WARM_UP_STEPS = 10.0, 20
DELAYED, DELAY = 0.005, 3.0


class Machine(Protocol):
    """What steps take, in seconds."""

    @property
    def table(self) -> TimeTable:
        """What is timed at load."""

    def target_s(self, rows: int, streams: int) -> float:
        """The target, with `rows` rows of `streams` streams."""

    def other_s(self, streams: int, drafts: bool) -> float:
        """The host, and the drafter where it drafts."""


@dataclass(frozen=True)
class TableMachine:
    """Milliseconds of steps by rows, with what drafting and the host add: a fixed part, and one for each stream."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    padded: bool
    draft_ms: tuple[float, float]
    host_ms: tuple[float, float]

    @cached_property
    def table(self) -> TimeTable:
        """See `Machine`."""
        return TimeTable(sequences=64, rows=list(self.rows), seconds=[1e-3 * ms for ms in self.ms], padded=self.padded)

    def target_s(self, rows: int, streams: int) -> float:
        """See `Machine`."""
        return self.table.at(rows)

    def other_s(self, streams: int, drafts: bool) -> float:
        """See `Machine`."""
        fixed, each = self.host_ms
        result = fixed + each * streams
        if drafts:
            result += self.draft_ms[0] + self.draft_ms[1] * streams
        return 1e-3 * result


@dataclass(frozen=True)
class LearnedMachine:
    """A machine as a controller that served on it knows it."""

    table: TimeTable
    """As it was timed at load."""
    costs: StepCosts
    method: str

    def target_s(self, rows: int, streams: int) -> float:
        """See `Machine`."""
        return self.costs.of(StepShape(streams)).target(rows)

    def other_s(self, streams: int, drafts: bool) -> float:
        """See `Machine`."""
        return self.costs.of(StepShape(streams)).other(self.method if drafts else "")


@dataclass
class Drawn:
    """What is drafted in a step: the trees' best nodes, the root first, -inf where a tree has fewer."""

    scores: np.ndarray
    """float64 [B, N + 1]"""
    followed: np.ndarray
    """bool [B, N]: whether the target would go there."""
    temperatures: list[float]
    """[B]"""
    prompt_rows: int = 0
    """Rows of others' prompts beside them."""


class Source(Protocol):
    """Streams that are served."""

    def draw(self, now: float, rng: np.random.Generator) -> Drawn | None:
        """What a step that begins at this second may verify; None after the end."""

    def accept(self, counts: np.ndarray) -> None:
        """Go on by `counts` accepted nodes int [B], and one token each."""


@dataclass
class Run:
    """What a run took: of each step the seconds, and those that plain decoding takes for its tokens."""

    seconds: np.ndarray
    plain: np.ndarray
    held_back: float = 0.0
    """Share of the steps in which only the ledger kept the controller from drafting."""

    @property
    def speed_up(self) -> float:
        """Over plain decoding, the first steps left out."""
        return float(self.plain[WARM_UP_STEPS:].sum() / self.seconds[WARM_UP_STEPS:].sum())

    @property
    def worst_window(self) -> float | None:
        """The least speed-up in any window of WINDOW_S after the first steps; None where the run is shorter."""
        seconds, plain = self.seconds[WARM_UP_STEPS:].cumsum(), self.plain[WARM_UP_STEPS:].cumsum()
        last = np.flatnonzero(seconds >= WINDOW_S)
        first = np.searchsorted(seconds, seconds[last] - WINDOW_S)
        ratios = (plain[last] - plain[first]) / (seconds[last] - seconds[first])
        return float(ratios.min()) if len(ratios) else None


def tree_of(scores: np.ndarray, kept: np.ndarray) -> TokenTree:
    """The nodes of [B, N + 1] that are kept, below their roots: budgets read scores only."""
    offsets = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32)
    parents = np.zeros(offsets[-1], np.int32)
    parents[offsets[:-1]] = -1
    return TokenTree(offsets, np.zeros(len(parents), np.int32), parents, scores[kept])


def cut(drawn: Drawn, counts: list[int]) -> tuple[TokenTree, np.ndarray]:
    """The best nodes of each tree, and how many of them are accepted [B]."""
    ranks = np.argsort(np.argsort(-drawn.scores, axis=1, kind="stable"), axis=1)
    kept = (ranks <= np.array(counts)[:, None]) & np.isfinite(drawn.scores)
    return tree_of(drawn.scores, kept), (kept[:, 1:] & drawn.followed).sum(1)


def started(machine: Machine, rng: np.random.Generator, calibration: Calibration) -> BudgetController:
    """A controller whose table was timed at load, each count a bit off."""
    table = replace(machine.table)
    table.seconds = [seconds * rng.normal(1.0, 0.05) for seconds in table.seconds]
    table.doubt()
    calibrations = {METHOD: calibration.model_copy(deep=True)}
    return BudgetController(Estimates(costs=StepCosts(tables=[table]), calibrations=calibrations))


def simulate(
    machine: Machine,
    source: Source,
    seed: int = 0,
    few_rows: float = 1.0,
    calibration: Calibration | None = None,
    delayed: float = DELAYED,
) -> Run:
    """Serve a source to its end by budgets that choose themselves, from this calibration on. `few_rows`: what the
    seconds of one and two rows were multiplied by where the table was timed at load, as on a busy machine. `delayed`:
    share of the steps that other programs delay."""
    rng, now, steps = np.random.default_rng(seed), 0.0, []
    controller = started(machine, rng, calibration or Calibration())
    table = controller.costs.tables[0]
    table.seconds[:2] = [few_rows * seconds for seconds in table.seconds[:2]]
    before = 0
    while (drawn := source.draw(now, rng)) is not None:
        streams, prompt_rows = len(drawn.scores), drawn.prompt_rows
        unasked = controller.unasked > 0 and streams == before and not prompt_rows
        if not unasked:
            controller.begin(StepShape(streams, int(prompt_rows > 0), prompt_rows))
        before, bands = streams, bands_of(drawn.temperatures)
        drafts = not unasked and controller.pays(METHOD, bands)
        counts = [0] * streams
        if drafts:
            choice = choose_nodes(tree_of(drawn.scores, np.isfinite(drawn.scores)), controller.terms(METHOD))
            controller.take(METHOD, choice)
            counts = choice.counts
        tree, accepted = cut(drawn, counts)
        step = taken(machine, drawn, int(tree.sizes.sum()), accepted, drafts, rng, delayed)
        if unasked:
            controller.note_unasked(step.seconds)
        else:
            controller.end([METHOD] * streams, bands, tree, accepted.tolist(), step.seconds, step.target_s)
        source.accept(accepted)
        steps.append((step.seconds, step.plain_s))
        now += step.seconds
    seconds, plain = np.array(steps).T
    return Run(seconds, plain, controller.held_back / len(steps))


def simulate_fixed(machine: Machine, source: Source, nodes: int, seed: int = 0) -> Run:
    """Serve a source to its end with `nodes` nodes for each stream, whatever pays."""
    rng, now, steps = np.random.default_rng(seed), 0.0, []
    while (drawn := source.draw(now, rng)) is not None:
        tree, accepted = cut(drawn, [nodes] * len(drawn.scores))
        step = taken(machine, drawn, int(tree.sizes.sum()), accepted, True, rng)
        source.accept(accepted)
        steps.append((step.seconds, step.plain_s))
        now += step.seconds
    seconds, plain = np.array(steps).T
    return Run(seconds, plain)


class Taken(NamedTuple):
    """Seconds of a step, of its target, and of plain decoding for as many tokens."""

    seconds: float
    target_s: float
    plain_s: float


def taken(
    machine: Machine,
    drawn: Drawn,
    rows: int,
    accepted: np.ndarray,
    drafts: bool,
    rng: np.random.Generator,
    delayed: float = DELAYED,
) -> Taken:
    """What a step of `rows` tree rows takes; a machine is a bit off, and slower by DELAY in `delayed` of the steps."""
    streams, prompt_rows = len(drawn.scores), drawn.prompt_rows
    noise = max(rng.normal(1.0, 0.03), 0.5) * (DELAY if rng.random() < delayed else 1.0)
    target_s = machine.target_s(rows + prompt_rows, streams) * noise
    host_s = machine.other_s(streams, False)
    plain_s, decode_s = (machine.target_s(streams + count, streams) * noise + host_s for count in (prompt_rows, 0))
    plain_s += decode_s * float(accepted.sum()) / streams
    return Taken(target_s + machine.other_s(streams, drafts), target_s, plain_s)
