"""Expected gains, step times, and the budgets that follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redraft.compiler.tuning.acceptance import Acceptance
from redraft.compiler.tuning.choice import NOTHING, StepTimes, choose, monotone


def steps_of(*steps: tuple[list[float], int]) -> Acceptance:
    """Steps that drafted a chain of nodes of these chances, the first few of which were accepted."""
    return Acceptance([([math.log(chance) for chance in chances], [n < right for n in range(len(chances))])
                       for chances, right in steps])  # fmt: skip


def times_of(plain: float, each: float, *budgets: int, running: int = 1) -> StepTimes:
    """Steps that take so long, and so much longer for each drafted row."""
    times = StepTimes()
    for budget in (0, *budgets):
        times.add(budget, running * (1 + budget), plain + each * running * budget)
    return times


def test_rows_of_a_batch_are_weighed_as_steps_share_them():
    """Two sequences a step, of which one is sure and right, and the other guesses wrong."""
    acceptance = steps_of(*[([0.9, 0.8, 0.7], 3), ([0.1, 0.05], 0)] * 3)
    assert [acceptance.expect(budget, 0.0, 2).tokens for budget in (0, 1, 2)] == [1, 2, 2.5]
    assert [acceptance.expect(budget, 0.0, 1).tokens for budget in (0, 1, 2)] == [1, 1.5, 2]


def test_nodes_that_are_not_likely_enough_are_neither_gained_nor_paid():
    acceptance = steps_of(*[([0.9, 0.8, 0.7], 3), ([0.1, 0.05], 1)] * 3)
    gain = acceptance.expect(9, 0.75)
    assert (gain.tokens, gain.rows) == (2, 2)
    assert acceptance.expect(9, 0.0).rows == 3.5


def test_what_few_steps_say_is_not_trusted():
    """The same mean, seen in 4 and in 400 steps."""
    sure = times_of(1.0, 0.2, 1, 3)
    few, many = (steps_of(*[([0.5], 1), ([0.5], 0)] * count) for count in (2, 200))
    assert choose({1: sure}, few, [0, 1, 3], [0.0], 0.03)[1] == NOTHING
    assert choose({1: sure}, many, [0, 1, 3], [0.0], 0.03)[1].nodes == 1


def test_unlikely_nodes_are_left_out_where_rows_are_expensive():
    acceptance = steps_of(*[([0.9], 1), ([0.1], 0), ([0.1], 0)] * 100)
    times = times_of(1.0, 0.2, 1)
    times.network = False
    cell = choose({1: times}, acceptance, [0, 1], [0.0, 0.5], 0.03)[1]
    assert (cell.nodes, cell.chance) == (1, 0.5)
    assert cell.speed_up == pytest.approx((1 + 1 / 3) / (1 + 0.2 / 3))


def test_budgets_do_not_grow_with_load():
    acceptance = steps_of(*[([0.9, 0.9, 0.9], 3), ([0.9, 0.9, 0.9], 2)] * 100)
    cells = choose(
        {1: times_of(1.0, 0.5, 1, 3), 4: times_of(1.0, 0.0, 1, 3, running=4)}, acceptance, [1, 3], [0.0], 0.1
    )
    assert cells[4].nodes <= cells[1].nodes


def test_times_between_and_beyond_the_budgets_measured():
    times = times_of(1.0, 0.25, 2, 6)
    assert times.seconds(5) == pytest.approx(2.0)
    assert times.seconds(1) == pytest.approx(1.5), "with drafts never less than with the fewest"
    assert times.seconds(14) == pytest.approx(5.0), "twice the rows, twice the time"


def test_a_busy_moment_of_the_machine_does_not_count():
    times = StepTimes()
    for seconds in (0.5, 0.010, 0.012, 0.4):
        times.add(0, 1, seconds)
    assert times.plain == pytest.approx(0.011)


def test_falling_times_take_their_mean():
    found = monotone(np.array([1.0, 3.0, 2.0, 4.0, 0.0]), np.array([1, 1, 1, 1, 3]))
    np.testing.assert_allclose(found, [1.0, 1.5, 1.5, 1.5, 1.5])
