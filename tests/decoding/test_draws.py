"""Random draws: noise, filters, and the laws of each construction's level, by tests of stated power.

Chi-square statistics are in standard deviations above their mean; 20000 draws find a law that is off by 3% anywhere.
"""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding.draws import (
    Beam,
    filter_log_probs,
    gumbel_noise,
    gumbel_top_k,
    independent,
    log_softmax,
    stochastic_beam,
    truncated_gumbels,
)
from redraft.decoding.sampling import Sampler
from redraft.request import SamplingConfig
from tests.decoding import laws
from tests.decoding.laws import chi_square

TRIALS = 20000
P = np.array([0.5, 0.3, 0.15, 0.05])
AFTER = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1], [0.01, 0.01, 0.49, 0.49]])


def noise(rows: int, support: int = 4, trials: int = TRIALS) -> np.ndarray:
    return gumbel_noise(3, 5, trials * rows, support).reshape(trials, rows, support)


def batch_of(p: np.ndarray) -> np.ndarray:
    log_probs = np.log(p).astype(np.float32).reshape(1, -1, p.shape[-1])
    return np.broadcast_to(log_probs, (TRIALS, *log_probs.shape[1:]))


def compare(outcomes, law: dict) -> float:
    """Chi-square of outcomes (tuples) against their law, in standard deviations."""
    names = list(law)
    codes = {name: place for place, name in enumerate(names)}
    counts = np.bincount([codes[tuple(outcome)] for outcome in outcomes], minlength=len(names))
    return chi_square(counts, np.array([law[name] for name in names]) * len(outcomes))


def test_noise_is_gumbel_and_keyed_by_seed_and_position():
    values = gumbel_noise(1, 2, 200, 111)
    assert values.dtype == np.float32
    edges = -np.log(-np.log(np.arange(1, 40) / 40))
    counts = np.bincount(np.searchsorted(edges, values.ravel()), minlength=40)
    assert chi_square(counts, np.full(40, values.size / 40)) < 4.5
    assert np.abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.03
    assert (values[:7] == gumbel_noise(1, 2, 7, 111)).all()
    for other in (gumbel_noise(2, 2, 200, 111), gumbel_noise(1, 3, 200, 111)):
        assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.03
    assert (gumbel_noise(2**64 - 1, 10**6, 3, 5) != gumbel_noise(2**64 - 2, 10**6, 3, 5)).all()


@pytest.mark.parametrize(
    "config",
    [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6}, {"temperature": 0.01},
     {"temperature": 2.0, "top_k": 40, "top_p": 0.7}],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [2, 111])
def test_filters_are_the_samplers(config, vocab_size):
    logits = np.random.default_rng(1).normal(size=(1, 5, vocab_size)).astype(np.float32) * 3
    chosen = SamplingConfig(**config)
    got = filter_log_probs(
        logits,
        np.array([chosen.temperature or 1.0], np.float32),
        np.array([chosen.top_k or 0], np.int32),
        np.array([chosen.top_p or 1.0], np.float32),
    )
    for row, node in zip(got[0], logits[0], strict=True):
        expected = Sampler(chosen, []).distribution(node).at(np.arange(vocab_size))
        assert np.abs(np.exp(row) - expected).max() < 2e-5
        assert np.isfinite(row).tolist() == (expected > 0).tolist() or not (chosen.top_k or chosen.top_p)


def test_filters_differ_by_request_and_leave_absent_tokens_out():
    logits = np.zeros((3, 2, 4), np.float32)
    logits[:, 0] = [4, 3, 2, 1]
    logits[2, 1] = -np.inf
    got = filter_log_probs(
        logits, np.array([1, 1e-4, 1], np.float32), np.array([2, 0, 0], np.int32), np.array([1, 1, 0.3], np.float32)
    )
    assert np.isfinite(got[:, 0]).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert np.isneginf(got[2, 1]).all()
    assert got[1, 0].tolist() == pytest.approx([0, -1e4, -2e4, -3e4], rel=1e-4)


def test_log_softmax():
    scores = np.array([[1000.0, 999.0, -np.inf], [-np.inf] * 3])
    assert log_softmax(scores)[0].tolist() == pytest.approx([-0.31326169, -1.31326169, -np.inf])
    assert np.isneginf(log_softmax(scores)[1]).all()


def test_gumbel_top_k_draws_without_replacement():
    draws = gumbel_top_k(batch_of(P), noise(1), 2)
    assert compare(draws.tolist(), dict(laws.without_replacement(np.log(P), 2))) < 4.5
    assert compare(draws[:, :1].tolist(), {(place,): chance for place, chance in enumerate(P)}) < 4.5
    assert compare(draws[:, ::-1].tolist(), dict(laws.without_replacement(np.log(P), 2))) > 9, "the test has power"


def test_gumbel_top_k_draws_at_each_node_by_its_own_distribution():
    draws = gumbel_top_k(batch_of(AFTER[:3]), noise(3), 2)
    assert draws.shape == (TRIALS, 6)
    for node in range(3):
        places = draws[:, 2 * node : 2 * node + 2] - 4 * node
        assert compare(places.tolist(), dict(laws.without_replacement(np.log(AFTER[node]), 2))) < 4.5


def test_independent_draws_repeat_and_belong_to_their_sequence():
    squares = {pair: P[pair[0]] * P[pair[1]] for pair in product(range(4), repeat=2)}
    assert compare(independent(batch_of(P), noise(2), 2).tolist(), squares) < 4.5
    draws = independent(batch_of(AFTER[[1, 3]]), noise(2), 2) - [0, 4]
    law = {pair: AFTER[1][pair[0]] * AFTER[3][pair[1]] for pair in product(range(4), repeat=2)}
    assert compare(draws.tolist(), law) < 4.5


def test_exhausted_supports_and_absent_nodes_draw_nothing():
    log_probs = np.full((1, 2, 3), -np.inf, np.float32)
    log_probs[0, 0, :2] = np.log([0.9, 0.1])
    gumbels = noise(2, 3, 1)
    assert sorted(gumbel_top_k(log_probs, gumbels, 4)[0, :4].tolist()) == [-1, -1, 0, 1]
    assert gumbel_top_k(log_probs, gumbels, 4)[0, 4:].tolist() == [-1] * 4
    draws, beam = stochastic_beam(log_probs, gumbels, Beam(np.zeros((1, 2)), np.zeros((1, 2))), 8)
    assert sorted(draws[0].tolist()) == [-1] * 6 + [0, 1]
    assert np.isneginf(beam.totals[0, 2:]).all()
    assert independent(log_probs, gumbels, 2)[0, 1] == -1


@pytest.fixture(scope="module")
def beams() -> tuple[np.ndarray, np.ndarray, Beam]:
    """Two levels of stochastic beam search of width 2: first draws, paths (first, second) in draw order, the beam."""
    first, beam = stochastic_beam(batch_of(P), noise(1), Beam.of_roots(TRIALS), 2)
    log_probs = np.log(AFTER).astype(np.float32)[first]
    fresh = gumbel_noise(4, 5, TRIALS * 2, 4).reshape(TRIALS, 2, 4)
    draws, beam = stochastic_beam(log_probs, fresh, beam, 2)
    parents = np.take_along_axis(first, draws // 4, axis=1)
    return first, np.stack([parents, draws % 4], axis=2), beam


def test_stochastic_beam_draws_paths_without_replacement(beams):
    first, paths, beam = beams
    assert compare(first.tolist(), dict(laws.without_replacement(np.log(P), 2))) < 4.5
    chances = {(a, b): P[a] * AFTER[a][b] for a in range(4) for b in range(4)}
    law = {(s, t): chances[s] * chances[t] / (1 - chances[s]) for s, t in permutations(chances, 2)}
    got = [tuple(map(tuple, pair)) for pair in paths.tolist()]
    assert compare(got, law) < 4.5
    assert compare([pair[::-1] for pair in got], law) > 9, "the test has power"
    expected = np.log([[chances[path] for path in pair] for pair in got[:500]])
    assert np.abs(beam.totals[:500] - expected).max() < 1e-5


def test_siblings_of_a_stochastic_beam_are_drawn_without_replacement(beams):
    """RSD, theorem 3.2, as verification needs it: each draw given its earlier siblings, and given that it is there.

    (Not given how many siblings there are: a beam with a second child had a less probable first one.)
    """
    first, paths, _ = beams
    both = (paths[:, :, 0] == first[:, :1]).all(axis=1)
    for token in range(3):
        of_token = first[:, 0] == token
        law = {(place,): chance for place, chance in enumerate(AFTER[token])}
        assert compare(paths[of_token][:, :1, 1].tolist(), law) < 4.5
        pairs = paths[of_token & both][:, :, 1]
        assert compare(pairs[:, :1].tolist(), law) > 6, "the count tells of the first"
        for place in np.unique(pairs[:, 0]):
            rest = {(other,): chance / (1 - AFTER[token][place]) for (other,), chance in law.items() if other != place}
            assert compare(pairs[pairs[:, 0] == place][:, 1:].tolist(), rest) < 4.5


def test_the_beams_best_are_children_of_the_best(beams):
    first, paths, beam = beams
    ranks = (paths[:, :, 0] == first[:, 1:]).astype(int)
    assert (ranks <= np.arange(2)).all()
    assert (np.diff(beam.gumbels) <= 0).all()


@given(st.integers(0, 2**32), st.sampled_from([1.0, 30.0, 1e4]))
@settings(max_examples=60)
def test_truncated_gumbels(seed, scale):
    rng = np.random.default_rng(seed)
    perturbed = (rng.normal(size=(2, 3, 7)) * scale).astype(np.float32)
    perturbed[:, :, 5] = -np.inf
    bounds = (perturbed.max(axis=-1) + rng.normal(size=(2, 3)) * 2).astype(np.float32)
    got = truncated_gumbels(perturbed, bounds)
    assert (got.max(axis=-1) == bounds).all()
    assert np.isneginf(got[:, :, 5]).all()
    order = np.argsort(perturbed, axis=-1, kind="stable")
    assert (np.diff(np.take_along_axis(got, order, axis=-1)[:, :, 1:], axis=-1) >= 0).all(), "monotone"
    if scale == 1.0:
        finite, u = np.delete(perturbed, 5, axis=-1).astype(np.float64), bounds[..., None].astype(np.float64)
        plain = -np.log(np.exp(-u) - np.exp(-finite.max(axis=-1, keepdims=True)) + np.exp(-finite))
        assert np.delete(got, 5, axis=-1) == pytest.approx(plain, rel=1e-4, abs=1e-4)
