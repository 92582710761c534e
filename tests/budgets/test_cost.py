"""The cost model: what a table says between its counts, and what steps correct."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from redraft.budgets.cost import LASTING, MOST_APART, RunningMean, StepCosts, StepShape, TimeTable

LINEAR = TimeTable(sequences=8, rows=[1, 16, 64], seconds=[0.010, 0.016, 0.040], padded=False)
PADDED = replace(LINEAR, padded=True)


def seconds(table, *rows):
    return [round(table.at(count), 6) for count in rows]


def test_time_is_linear_between_counts_or_that_of_the_next():
    assert seconds(LINEAR, 1, 16, 40, 128) == [0.010, 0.016, 0.028, 0.080]
    assert seconds(PADDED, 1, 2, 16, 17, 64, 128) == [0.010, 0.016, 0.016, 0.040, 0.040, 0.080]


def test_more_rows_never_cost_less():
    noisy = TimeTable(sequences=1, rows=[1, 2, 4], seconds=[0.012, 0.010, 0.011], padded=False)
    assert seconds(noisy, 1, 2, 3, 4) == [0.012] * 4


@pytest.mark.parametrize("padded", [False, True])
def test_steps_correct_a_table_that_is_wrong(padded):
    """Rows 8 and 40 take other times than the table says, at a load that makes all slower, with a slow step now and
    then."""
    rng = np.random.default_rng(0)
    costs = StepCosts(tables=[TimeTable(sequences=8, rows=[8, 40, 64], seconds=[0.010, 0.016, 0.040], padded=padded)])
    truth, shape = {8: 0.015, 40: 0.045}, StepShape(8)
    for _ in range(400):
        rows = int(rng.choice([8, 40]))
        drafting = "m" if rows > 8 else ""
        slow = 10 if rng.random() < 0.01 else 1
        target_s = truth[rows] * slow
        costs.of(shape).observe(rows, drafting, target_s + (0.004 if drafting else 0.001), target_s)
    learned = costs.of(shape)
    predicted = [learned.target(8), learned.target(40)]
    assert predicted == pytest.approx([0.015, 0.045], rel=0.08)
    assert (learned.other(""), learned.other("m")) == pytest.approx((0.001, 0.004))
    assert costs.error < 0.15


@pytest.mark.parametrize("padded", [False, True])
def test_what_was_timed_on_a_busy_machine_is_soon_forgotten(padded):
    """It would catch a table that a factor of all its counts has to excuse: one row would be known for a third of what
    it takes, and drafts for three times what they are worth."""
    table = TimeTable(sequences=1, rows=[1, 8], seconds=[0.047, 0.05], padded=padded)
    table.doubt()
    costs, truth = StepCosts(tables=[table]), {1: 0.010, 8: 0.018}
    for rows in (1, 1, 1, 8, 8, 8, 8, 8):
        costs.of(StepShape(1)).observe(rows, "", truth[rows] + 0.001, truth[rows])
    learned = costs.of(StepShape(1))
    assert (learned.target(1), learned.target(8)) == pytest.approx((0.010, 0.018), rel=0.08)


@pytest.mark.parametrize("doubted", [False, True])
def test_fewer_rows_take_no_longer_than_more(doubted):
    """It would catch a correction of the time of 32 rows by what that of 16 was too long: it would go on for ever."""
    table = TimeTable(sequences=1, rows=[16, 32], seconds=[0.030, 0.020], padded=True)
    if doubted:
        table.doubt()
    for _ in range(200):
        table.correct(32, 0.020 / table.at(32))
    assert seconds(table, 16, 32) == pytest.approx([0.020, 0.020], rel=0.01)


def test_a_delay_does_not_make_a_row_count_known_for_slow():
    """It would catch a first step that replaces what was timed though it is slower: budgets would keep away from it."""
    table = TimeTable(sequences=1, rows=[1, 8], seconds=[0.010, 0.018], padded=True)
    table.doubt()
    costs = StepCosts(tables=[table])
    for rows, delay in ((1, 1), (1, 1), (8, 5), (1, 1)):
        costs.of(StepShape(1)).observe(rows, "", 0.010 * delay, 0.010 * delay)
    assert costs.of(StepShape(1)).target(8) < 0.018 * MOST_APART


def test_a_load_that_was_not_seen_takes_the_nearest():
    costs = StepCosts(tables=[LINEAR])
    costs.of(StepShape(1)).observe(1, "m", 0.015, 0.010)
    costs.of(StepShape(1, 1, 63)).observe(64, "m", 0.060, 0.040)
    assert costs.of(StepShape(16)).other("m") == pytest.approx(0.005)
    assert costs.of(StepShape(2, 1, 9)).other("m") == pytest.approx(0.020)
    assert costs.of(StepShape(16)).other("") == 0, "of the host alone nothing is known"


def test_a_mean_forgets_a_slow_start_and_shrugs_at_outliers():
    mean = RunningMean()
    for value in (1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 5.0):
        mean.add(value)
    assert mean.value <= 0.1 * MOST_APART


def test_a_mean_follows_what_lasts():
    """It would catch a mean that takes each value of a machine that has become slower for good for an outlier: it would
    know a drafter of six times the time after 140 steps. A burst of other programs is none."""
    mean = RunningMean()
    for value in [0.1] * 20 + [0.6] * (LASTING - 1) + [0.1]:
        mean.add(value)
    assert mean.value < 0.12
    for value in [0.6] * (LASTING + 8):
        mean.add(value)
    assert mean.value > 0.4
    for value in [0.1] * (LASTING + 8):
        mean.add(value)
    assert mean.value < 0.25
