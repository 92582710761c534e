"""Clocks around an engine's networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise, TargetBatch
from redraft.engines.api import (
    DraftEngine,
    DrawingEngine,
    Engine,
    LogitRows,
    Meanwhile,
    ResamplingEngine,
    Samplers,
    overlapping,
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


class TimedEngine:
    """An engine with a clock."""

    def __init__(self, engine: Engine, clock: EngineClock):
        self._engine, self._clock = engine, clock
        self._device = overlapping(engine)
        self.drafters: Mapping[str, DraftEngine] = {
            name: TimedDrafter(drafter, clock) for name, drafter in engine.drafters.items()
        }

    @property
    def overlaps(self) -> bool:
        """See `DeviceEngine.overlaps`."""
        return self._device is not None

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Features | None]:
        """See `DeviceEngine.execute`. The target's time is until the host has the results. `meanwhile` adds to it only
        where it takes longer than the device: the step does then too, and when the device was done is not known."""
        started = time.perf_counter()
        if self._device is not None:
            result = self._device.execute(batch, samplers, meanwhile)
        else:
            result = self._engine.execute(batch, samplers)
        self._clock.target_s += time.perf_counter() - started
        return result

    @property
    def reuse_refusal(self) -> str | None:
        """See `Engine.reuse_refusal`."""
        return self._engine.reuse_refusal

    @property
    def step_shapes(self) -> Sequence[tuple[int, int]]:
        """See `Engine.step_shapes`."""
        return self._engine.step_shapes

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""
        started = time.perf_counter()
        self._engine.copy(source, target, rows)
        self._clock.target_s += time.perf_counter() - started

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()


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
