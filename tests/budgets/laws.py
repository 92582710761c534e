"""Traffic by stated laws, for the virtual clock.

A tree has a chain of DEPTH nodes, each with siblings. The drafter's chance of the next node of the chain is drawn anew
for each step of a stream, from a Beta distribution that says how predictable the text is; the target follows with that
chance times `truth`, so that a drafter with `truth` below 1 promises too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.budgets.simulation import Drawn, Machine, TableMachine, cut

DEPTH, SIBLINGS = 5, 3
NODES = DEPTH * SIBLINGS

CPU = TableMachine(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    ms=(10.6, 11.6, 12.1, 12.5, 15.0, 21.8, 33.0, 57.0, 105.0),
    padded=False,
    draft_ms=(3.0, 0.15),
    host_ms=(0.3, 0.05),
)
GPU = TableMachine(
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
        return replace(CODE if share < 0.5 else RANDOM, streams=streams)

    return mix


def steady(traffic: Traffic, streams: int = 1) -> Mix:
    served = replace(traffic, streams=streams)
    return lambda now: served


@dataclass
class LawSource:
    """A mix for so many seconds."""

    mix: Mix
    seconds: float

    def draw(self, now: float, rng: np.random.Generator) -> Drawn | None:
        return draw(rng, self.mix(now)) if now < self.seconds else None

    def accept(self, counts: np.ndarray) -> None:
        """Each step is drawn anew."""


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
    temperatures = [traffic.temperature] * streams
    return Drawn(scores, followed.reshape(streams, NODES), temperatures, traffic.prompt_rows)


def best_fixed(machine: Machine, mix: Mix, seconds: float) -> float:
    """The speed-up over plain decoding of the best budget per stream that never changes, 0 included."""
    rng, speed_ups = np.random.default_rng(1), np.zeros((0, NODES + 1))
    for now in np.linspace(0, seconds, 60, endpoint=False):
        streams = mix(now).streams
        plain_s = machine.target_s(streams, streams) + machine.other_s(streams, False)
        drawn = draw(rng, replace(mix(now), streams=400))
        row = [1.0]
        for budget in range(1, NODES + 1):
            tokens = 1 + cut(drawn, [budget] * 400)[1].mean()
            step_s = machine.target_s(streams * (1 + budget), streams) + machine.other_s(streams, True)
            row.append(tokens * plain_s / step_s)
        speed_ups = np.vstack([speed_ups, row])
    return float(speed_ups.mean(0).max())
