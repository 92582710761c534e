"""Clocks around an engine's networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise, TargetBatch
from redraft.engines.api import (
    DraftEngine,
    DrawingEngine,
    Engine,
    EngineAround,
    LogitRows,
    Meanwhile,
    ResamplingEngine,
    Samplers,
)
from redraft.engines.features import Features

Result = TypeVar("Result")


@dataclass
class EngineClock:
    """Seconds inside the target's network and inside the drafters'."""

    target_s: float = 0.0
    draft_s: float = 0.0

    @property
    def engine_s(self) -> float:
        """Seconds inside any network."""
        return self.target_s + self.draft_s

    def time_draft(self, call: Callable[..., Result], *inputs: object) -> Result:
        """A drafter's call, timed."""
        started = time.perf_counter()
        result = call(*inputs)
        self.draft_s += time.perf_counter() - started
        return result


class TimedEngine(EngineAround):
    """An engine with a clock."""

    def __init__(self, engine: Engine, clock: EngineClock):
        super().__init__(engine)
        self._clock = clock
        self._drafters = {name: TimedDrafter(drafter, clock) for name, drafter in engine.drafters.items()}

    @property
    def drafters(self) -> Mapping[str, DraftEngine]:
        """Those of the engine, with the same clock."""
        return self._drafters

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Features | None]:
        """See `Engine.execute`. The target's time is until the host has the results. `meanwhile` adds to it only where
        it takes longer than the device: the step does then too, and when the device was done is not known."""
        started = time.perf_counter()
        result = super().execute(batch, samplers, meanwhile)
        self._clock.target_s += time.perf_counter() - started
        return result

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""
        started = time.perf_counter()
        super().copy(source, target, rows)
        self._clock.target_s += time.perf_counter() - started


class TimedDrafter:
    """A drafter with a clock. It draws and re-samples if the drafter does."""

    def __init__(self, drafter: DraftEngine, clock: EngineClock):
        self._drafter, self._clock = drafter, clock
        self.reads_context, self.reads_text = drafter.reads_context, drafter.reads_text
        if isinstance(drafter, ResamplingEngine):
            self.resample = partial(clock.time_draft, drafter.resample)
        if isinstance(drafter, DrawingEngine):
            self.draw = partial(clock.time_draft, drafter.draw)

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """See `DraftEngine.draft`."""
        return self._clock.time_draft(self._drafter.draft, batch, noise)
