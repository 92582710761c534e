"""The calibration: chances become what is accepted, by temperature, and again after the traffic has changed."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.budgets.gain import Calibration, bands_of


def drafted(calibration, rng, band, truth, drafts):
    for _ in range(drafts // 4):
        expected = rng.random(4) * 3
        calibration.observe(band, rng.poisson(truth * expected).sum(), expected.sum(), 4)


def test_bands():
    assert bands_of([0.0, 0.3, 0.5, 0.7, 1.0, 2.0]) == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("truth", [0.3, 0.7, 1.1])
def test_ratios_become_what_was_accepted(truth):
    calibration = Calibration()
    assert calibration.ratios(range(4)) == [0.5] * 4, "drafts little at first"
    drafted(calibration, np.random.default_rng(0), 3, truth, 2000)
    assert calibration.ratios([3])[0] == pytest.approx(truth, rel=0.1)
    assert calibration.ratios(range(3)) == [0.5] * 3, "of other temperatures nothing was learned"


def test_greedy_drafts_begin_with_what_training_measured():
    calibration = Calibration.measured(0.9)
    assert calibration.ratios(range(4)) == [0.9, 0.5, 0.5, 0.5]
    drafted(calibration, np.random.default_rng(0), 0, 0.3, 2000)
    assert calibration.ratios([0])[0] == pytest.approx(0.3, rel=0.1), "the traffic knows better"


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.1), (0.2, 1.0)])
def test_a_change_of_traffic_shows_within_a_hundred_drafts(before, after):
    rng, calibration = np.random.default_rng(0), Calibration()
    drafted(calibration, rng, 0, before, 4000)
    drafted(calibration, rng, 0, after, 100)
    assert abs(calibration.ratios([0])[0] - after) < 0.5 * abs(calibration.ratios([0])[0] - before)


def test_states_do_not_share_their_tallies():
    first, second = Calibration(), Calibration()
    first.observe(0, 3, 3.0, 1)
    assert second.ratios([0])[0] == 0.5
