"""Timing at load: which steps are timed, and that it ends in time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from redraft.budgets.warm_up import time_steps
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import ToyEngine

LIMITS = Limits(slots=4, max_len=64, max_tree=16, prefill_chunk=16)


class PricedEngine(ToyEngine):
    """Steps that take a time by their rows, on a clock of its own."""

    now = 0.0

    def execute(self, batch, samplers=None, meanwhile=None):
        PricedEngine.now += 0.01 + 0.001 * len(batch.input_ids)
        return super().execute(batch, samplers)


def timed(monkeypatch, engine, **options):
    monkeypatch.setattr(time, "perf_counter", lambda: PricedEngine.now)
    PricedEngine.now = 0.0
    return time_steps(engine, LIMITS, 15, **options)


def test_rows_of_any_count_are_timed_and_interpolated(monkeypatch):
    costs = timed(monkeypatch, PricedEngine(slots=4))
    (table,) = costs.tables
    assert table.rows == [1, 2, 4, 8, 16, 32, 64]
    assert np.allclose([table.at(rows) for rows in (1, 3, 48)], [0.011, 0.013, 0.058])


def test_the_shapes_that_steps_are_padded_to_are_timed(monkeypatch):
    engine = PricedEngine(slots=4)
    engine.step_shapes = [(4, 64), (4, 16), (1, 16), (1, 4), (1, 512)]
    costs = timed(monkeypatch, engine)
    assert [(table.sequences, table.rows, table.padded) for table in costs.tables] == [
        (1, [4, 16], True),
        (4, [16, 64], True),
    ]


def test_timing_ends_in_time_with_the_counts_that_every_decision_needs(monkeypatch):
    costs = timed(monkeypatch, PricedEngine(slots=4), seconds=0.25)
    assert costs.tables[0].rows == [1, 2, 4, 8, 16, 32]
    assert PricedEngine.now < 0.25 + 0.037, "and the first steps of the two that are needed"
    costs = timed(monkeypatch, PricedEngine(slots=4), seconds=0.0)
    assert costs.tables[0].rows == [1, 16]


def test_a_first_step_is_not_counted(monkeypatch):
    engine, seen = PricedEngine(slots=4), set()
    execute = engine.execute

    def slow_at_first(batch, samplers=None):
        PricedEngine.now += 0.0 if len(batch.input_ids) in seen else 3.0
        seen.add(len(batch.input_ids))
        return execute(batch, samplers)

    engine.execute = slow_at_first
    costs = timed(monkeypatch, engine, seconds=20.0)
    assert costs.tables[0].rows == [1, 2, 4, 8, 16, 32, 64]
    assert costs.tables[0].at(1) == pytest.approx(0.011)
