"""The choice against all that could be chosen."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.budgets.choice import best_count


@pytest.mark.parametrize("seed", range(20))
def test_no_count_makes_more_tokens_per_second(seed):
    rng = np.random.default_rng(seed)
    chances = np.sort(rng.random(40))[::-1]
    tokens, seconds = int(rng.integers(1, 20)), 1 + np.sort(rng.random(41)) * rng.integers(1, 9)
    rates = [(tokens + chances[:n].sum()) / seconds[n] for n in range(41)]
    assert best_count(chances, tokens, seconds) == int(np.argmax(rates))


def test_a_bucket_is_filled_and_its_edge_is_not_crossed_for_little():
    chances = np.full(20, 0.3)
    seconds = np.where(np.arange(21) <= 15, 5.0, 9.0)
    assert best_count(chances, 1, seconds) == 15


def test_nothing_is_drafted_where_no_node_pays_and_without_nodes():
    assert best_count(np.array([0.1, 0.05]), 1, np.array([1.0, 1.2, 1.4])) == 0
    assert best_count(np.zeros(0), 4, np.array([1.0])) == 0
