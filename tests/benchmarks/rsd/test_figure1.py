"""RSD's figure 1: values by hand, and the order of the methods."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rsd.figure1 import METHODS, plot, table

GRID = np.linspace(0.02, 0.98, 25)


@pytest.mark.parametrize("name", METHODS)
def test_equal_distributions_are_always_accepted(name):
    assert [METHODS[name](p, p) for p in GRID] == pytest.approx(np.ones(25))


def test_recursive_rejection_always_accepts():
    assert [METHODS["Recursive rejection"](p, q) for p in GRID for q in GRID] == pytest.approx(np.ones(625))


def test_values_by_hand():
    """q = .5, p = .9. Multi-round: .6 at once, and of the other .4 a tenth. K-SEQ: gamma^2 - 1.9 gamma + .5 = 0 and
    beta = .5 / gamma + .1. Optimal transport: two draws of 1 come with .81, of which the target takes .5."""
    gamma = (1.9 + np.sqrt(1.9**2 - 2)) / 2
    expected = [0.64, 1 - (0.9 - 0.5 / gamma) ** 2, 0.69, 1.0]
    assert [rate(0.9, 0.5) for rate in METHODS.values()] == pytest.approx(expected)


def test_no_method_beats_the_optimum_of_independent_draws_but_recursive_rejection():
    for p in GRID:
        for q in GRID:
            multi_round, k_seq, best, recursive = (rate(p, q) for rate in METHODS.values())
            assert max(multi_round, k_seq) <= best + 1e-12 <= recursive + 2e-12
            assert k_seq >= best * (1 - 1 / np.e)


def test_the_table_and_the_plot(tmp_path):
    assert table().row_count == 15
    assert plot(tmp_path / "reports" / "figure1.png").read_bytes().startswith(b"\x89PNG")
