"""Intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.loadtest.intervals import interval, ratio


def test_the_interval_has_the_width_of_the_normal_law():
    values = np.random.default_rng(0).normal(3.0, 1.0, 101)
    low, high = interval(ratio(values, np.ones(101)))
    error = values.std() / np.sqrt(101)
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


def test_what_is_compared_shares_its_prompts():
    """Prompts differ widely, methods by a constant: the difference is certain."""
    steps = np.random.default_rng(1).integers(5, 50, 21).astype(float)
    first = ratio(3 * steps, steps)
    assert interval(ratio(3.5 * steps, steps) - first) == pytest.approx((0.5, 0.5))
    assert interval(ratio(steps**2, steps))[0] < interval(ratio(steps**2, steps))[1]


def test_long_answers_count_for_what_they_are():
    assert np.mean(ratio(np.array([1.0, 90.0]), np.array([10.0, 30.0]))) > 1.0


def test_prompts_without_steps():
    assert np.isnan(interval(np.array([]))).all()
    assert not np.isnan(interval(ratio(np.array([0.0, 4.0, 0.0]), np.array([0.0, 2.0, 0.0])))).any()
