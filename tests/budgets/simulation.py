"""A null engine on a virtual clock: steps take what a machine's tables say, and drafts are accepted by a stated law.

A tree has a chain of DEPTH nodes, each with siblings. The drafter's chance of the next node of the chain is drawn anew
for each step of a stream, from a Beta distribution that says how predictable the text is; the target follows with that
chance times `truth`, so that a drafter with `truth` below 1 promises too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, StepShape, TimeTable
from redraft.budgets.gain import bands_of
from redraft.decoding.token_tree import TokenTree

DEPTH, SIBLINGS = 5, 3
NODES = DEPTH * SIBLINGS
METHOD = "drafter"
PARENTS = np.array([-1, *(0 if level == 0 else 1 + (level - 1) * SIBLINGS for level in range(DEPTH) for _ in "abc")])
WINDOW_S, WARM_UP_STEPS = 10.0, 20


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps by rows, with what drafting and the host add for so many streams."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    padded: bool
    draft_ms: tuple[float, float]
    host_ms: tuple[float, float]

    @cached_property
    def table(self) -> TimeTable:
        return TimeTable(sequences=64, rows=list(self.rows), seconds=[1e-3 * ms for ms in self.ms], padded=self.padded)

    def target_s(self, rows: int) -> float:
        return self.table.at(rows)

    def other_s(self, streams: int, drafts: bool) -> float:
        fixed, each = self.host_ms
        result = fixed + each * streams
        if drafts:
            result += self.draft_ms[0] + self.draft_ms[1] * streams
        return 1e-3 * result


CPU = Machine(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    ms=(10.6, 11.6, 12.1, 12.5, 15.0, 21.8, 33.0, 57.0, 105.0),
    padded=False,
    draft_ms=(3.0, 0.15),
    host_ms=(0.3, 0.05),
)
GPU = Machine(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024),
    ms=(5.0, 5.0, 5.0, 5.0, 5.0, 5.2, 5.6, 7.0, 9.0, 11.0, 15.0, 19.0, 27.0, 36.0),
    padded=True,
    draft_ms=(1.0, 0.01),
    host_ms=(0.2, 0.02),
)


@dataclass(frozen=True)
class Traffic:
    """What is served: the Beta distribution of chances, how true they are, the temperature, streams, and rows of
    another's prompt in each step."""

    beta: tuple[float, float]
    truth: float = 1.0
    temperature: float = 0.0
    streams: int = 1
    prompt_rows: int = 0


Mix = Callable[[float], Traffic]
"""What is served at a time, seconds."""
CHAT, CODE, RANDOM = Traffic((2.2, 1.8)), Traffic((6.0, 1.2)), Traffic((1.2, 3.0), truth=0.08)
SAMPLED = Traffic((1.6, 1.8), truth=0.7, temperature=1.0)


def ramp(seconds: float) -> Mix:
    """1 to 16 to 1 streams, of code edits until the middle, of text that nothing predicts from there on."""

    def mix(now: float) -> Traffic:
        share = min(now / seconds, 1.0)
        streams = 1 + round(15 * (1 - abs(2 * share - 1)))
        kind = CODE if share < 0.5 else RANDOM
        return Traffic(kind.beta, kind.truth, kind.temperature, streams)

    return mix


def steady(traffic: Traffic, streams: int = 1) -> Mix:
    served = Traffic(traffic.beta, traffic.truth, traffic.temperature, streams)
    return lambda now: served


@dataclass
class Drawn:
    """Trees of one step, and which of their nodes the target would follow."""

    scores: np.ndarray  # float64 [B, NODES + 1], the root's first
    followed: np.ndarray  # bool [B, NODES]


def draw(rng: np.random.Generator, traffic: Traffic) -> Drawn:
    streams = traffic.streams
    chain = rng.beta(*traffic.beta, size=(streams, DEPTH))
    above = np.concatenate([np.ones((streams, 1)), np.cumprod(chain, axis=1)[:, :-1]], axis=1)
    rest = (1 - chain) * 0.4
    chances = np.stack([above * chain, above * rest, above * rest / 2], axis=2)  # [B, DEPTH, SIBLINGS]
    lots = rng.random((streams, DEPTH)) / traffic.truth
    picked = np.where(lots < chain, 0, np.where(lots < chain + rest, 1, np.where(lots < chain + 1.5 * rest, 2, 3)))
    alive = np.cumprod(np.concatenate([np.ones((streams, 1)), picked[:, :-1] == 0], axis=1), axis=1).astype(bool)
    followed = (picked[:, :, None] == np.arange(SIBLINGS)) & alive[:, :, None]
    scores = np.log(np.concatenate([np.ones((streams, 1)), chances.reshape(streams, NODES)], axis=1))
    return Drawn(scores, followed.reshape(streams, NODES))


def tree_of(scores: np.ndarray, kept: np.ndarray) -> TokenTree:
    """The nodes of [B, NODES + 1] that are kept."""
    offsets = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32)
    parents = np.broadcast_to(PARENTS, scores.shape)[kept].astype(np.int32)
    return TokenTree(offsets, np.zeros(len(parents), np.int32), parents, scores[kept])


def cut(drawn: Drawn, counts: list[int]) -> tuple[TokenTree, np.ndarray]:
    """The best nodes of each tree, and how many of them are accepted [B]."""
    ranks = np.argsort(np.argsort(-drawn.scores, axis=1, kind="stable"), axis=1)
    kept = ranks <= np.array(counts)[:, None]
    return tree_of(drawn.scores, kept), (kept[:, 1:] & drawn.followed).sum(1)


def best_fixed(machine: Machine, mix: Mix, seconds: float) -> float:
    """The speed-up over plain decoding of the best budget per stream that never changes, 0 included."""
    rng, speed_ups = np.random.default_rng(1), np.zeros((0, NODES + 1))
    for now in np.linspace(0, seconds, 60, endpoint=False):
        traffic = mix(now)
        plain_s = machine.target_s(traffic.streams) + machine.other_s(traffic.streams, False)
        drawn = draw(rng, replace(traffic, streams=400))
        row = [1.0]
        for budget in range(1, NODES + 1):
            tokens = 1 + cut(drawn, [budget] * 400)[1].mean()
            step_s = machine.target_s(traffic.streams * (1 + budget)) + machine.other_s(traffic.streams, True)
            row.append(tokens * plain_s / step_s)
        speed_ups = np.vstack([speed_ups, row])
    return float(speed_ups.mean(0).max())


@dataclass
class Run:
    """What a run took: of each step the seconds, and those that plain decoding would have taken for its tokens."""

    seconds: np.ndarray
    plain: np.ndarray
    held_back: float
    """Share of the steps in which only the ledger kept the controller from drafting."""

    @property
    def speed_up(self) -> float:
        """Over plain decoding, the first steps left out."""
        return float(self.plain[WARM_UP_STEPS:].sum() / self.seconds[WARM_UP_STEPS:].sum())

    @property
    def worst_window(self) -> float:
        """The least speed-up in any window of WINDOW_S after the first steps."""
        seconds, plain = self.seconds[WARM_UP_STEPS:].cumsum(), self.plain[WARM_UP_STEPS:].cumsum()
        last = np.flatnonzero(seconds >= WINDOW_S)
        first = np.searchsorted(seconds, seconds[last] - WINDOW_S)
        return float(((plain[last] - plain[first]) / (seconds[last] - seconds[first])).min())


def started(machine: Machine, rng: np.random.Generator) -> BudgetController:
    """A controller whose table was timed at load, each count a bit off."""
    table = replace(machine.table)
    table.seconds = [seconds * rng.normal(1.0, 0.05) for seconds in table.seconds]
    return BudgetController(Estimates(costs=StepCosts(tables=[table])))


def simulate(machine: Machine, mix: Mix, seconds: float, seed: int = 0, few_rows: float = 1.0) -> Run:
    """Serve a mix for so long by a controller's budgets. `few_rows`: what the seconds of one and two rows were
    multiplied by where the table was timed at load, as on a busy machine."""
    rng, now, steps = np.random.default_rng(seed), 0.0, []
    controller = started(machine, rng)
    table = controller.costs.tables[0]
    table.seconds[:2] = [few_rows * seconds for seconds in table.seconds[:2]]
    while now < seconds:
        traffic = mix(now)
        streams = traffic.streams
        bands = bands_of(np.full(streams, traffic.temperature))
        drawn = draw(rng, traffic)
        prompt_rows = traffic.prompt_rows
        controller.begin(StepShape(streams, int(prompt_rows > 0), prompt_rows))
        drafts = controller.pays(METHOD, bands)
        tree, accepted = cut(
            drawn,
            controller.share(METHOD, tree_of(drawn.scores, np.isfinite(drawn.scores))) if drafts else [0] * streams,
        )
        noise = max(rng.normal(1.0, 0.03), 0.5) * (3.0 if rng.random() < 0.005 else 1.0)
        target_s = machine.target_s(int(tree.sizes.sum()) + prompt_rows) * noise
        step_s = target_s + machine.other_s(streams, drafts)
        host_s = machine.other_s(streams, False)
        plain_s, decode_s = (machine.target_s(streams + rows) * noise + host_s for rows in (prompt_rows, 0))
        controller.end([METHOD] * streams, [traffic.temperature] * streams, tree, accepted.tolist(), step_s, target_s)
        steps.append((step_s, plain_s + decode_s * accepted.sum() / streams))
        now += step_s
    return Run(*np.array(steps).T, held_back=controller.held_back / len(steps))
