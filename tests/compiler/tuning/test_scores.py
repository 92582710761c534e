"""The fit of node scores: what made the data is found again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compiler.tuning.scores import (
    Drafted,
    Guess,
    Visited,
    fit_ngram_rate,
    fit_sharpness,
    guesses,
    reliability,
    visited,
)
from redraft.decoding.growth import joint_odds
from redraft.decoding.ngram import CHANCES
from redraft.decoding.noise import KnownNoise, race

SUPPORT = 57


def nodes_of(beta: float, scored_with: float, candidates: int, count: int = 3000) -> list[Visited]:
    """Nodes at which candidates come with the chances softmax(beta (log p + g)), and a few times another token."""
    rng = np.random.default_rng(7)
    log_p = np.log(rng.dirichlet(np.full(SUPPORT, 0.3), count) + 1e-9)
    perturbed = log_p + rng.gumbel(size=log_p.shape)
    chances = np.exp(beta * perturbed)
    chances /= chances.sum(1, keepdims=True)
    scores = scored_with * perturbed
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    found = []
    for own, given in zip(chances, scores, strict=True):
        best = np.argsort(-given)[:candidates]
        found.append(Visited(0, int(rng.choice(SUPPORT, p=own)), best, given[best]))
    return found


@pytest.mark.parametrize(("beta", "candidates"), [(0.6, SUPPORT), (1.2, SUPPORT), (0.8, 9), (1.1, 9)])
def test_the_sharpness_is_found(beta, candidates):
    found = fit_sharpness(nodes_of(beta, 0.8, candidates), 0.8, SUPPORT)
    assert found == pytest.approx(beta, abs=0.06)


def test_the_rate_of_ngrams_is_found():
    """By themselves, and joined with a drafter's scores."""
    rng = np.random.default_rng(3)
    for rate, drafts in ((2.0, False), (0.7, True)):
        found = []
        for prior, noise in zip(rng.choice([0.36, 0.62, 0.9], 4000), rng.exponential(size=4000), strict=True):
            chance, neural = math.exp(-rate * noise * (1 - prior) / prior), None
            if drafts:
                neural = float(rng.uniform(0, 0.5))
                odds = joint_odds(min(chance, 1 - 1e-9), neural, False)
                chance = odds / (1 + odds)
            found.append(Guess(prior, noise, neural, bool(rng.random() < chance)))
        assert fit_ngram_rate(found, False) == pytest.approx(rate, rel=0.13)


def test_few_records_fit_nothing():
    assert fit_sharpness(nodes_of(1.0, 0.8, 9, 20), 0.8, SUPPORT) is None
    assert fit_ngram_rate([Guess(0.5, 1.0, None, True)] * 9, True) is None


DRAFTED = Drafted(
    np.array([[[4, 7], [0, 0]], [[5, 6], [9, 8]]], np.int32),
    np.log(np.array([[[0.5, 0.25], [1, 1]], [[0.125, 0.05], [0.2, 0.1]]], np.float32)),
    np.array([[0, 0], [1, 0]], np.int32),
)
"""Two levels of two nodes: below 7 come 5 and 6, below 4 come 9 and 8."""


@pytest.mark.parametrize(
    ("text", "chances", "accepted"),
    [
        ([7, 6, 1], [[0.5, 0.25], [0.5, 0.2]], [[False, True], [False, True]]),
        ([4, 3], [[0.5, 0.25], [0.4, 0.2]], [[True, False], [False, False]]),
        ([1, 5], [[0.5, 0.25]], [[False, False]]),
        ([4], [[0.5, 0.25]], [[True, False]]),
    ],
)
def test_visited_nodes_are_those_that_the_text_goes_through(text, chances, accepted):
    found = list(visited(DRAFTED, text))
    np.testing.assert_allclose([np.exp(node.scores) for node in found], chances, rtol=1e-6)
    assert [node.accepted.tolist() for node in found] == accepted


def test_guesses_stand_beside_what_was_drafted_there():
    """2, 3, 7 and 5 came before: after 2 and 3, at output position 2, 7 is guessed, and below it 5."""
    prompt, answer, seed = [2, 3, 7, 5], [2, 3, 7, 6], 2**40 + 1
    found = list(guesses(prompt, answer, seed, {2: DRAFTED}))
    assert [(guess.prior, guess.came) for guess in found] == [(CHANCES[2][0], True), (CHANCES[3][0], False)]
    assert [guess.neural for guess in found] == [pytest.approx(0.25), pytest.approx(0.5)]
    noise = race(seed, np.array([2, 3]), np.array([7, 5]))
    assert [guess.noise for guess in found] == pytest.approx(noise.tolist(), rel=1e-6)
    everywhere = list(guesses(prompt, answer, seed, {}))
    assert [guess.came for guess in everywhere] == [True, True, False], "3 after 2, 7 after 3, 5 after 7"
    assert all(guess.neural is None for guess in everywhere)


def test_a_guess_is_as_likely_as_its_chance_says():
    """Draws of a token of probability 0.3 by its noise among others, by classes of the chance that its noise gives."""
    seeds = np.arange(4000)
    arrivals = race(seeds[:, None], 5, np.arange(3)) / np.array([0.3, 0.5, 0.2])
    chances = [KnownNoise(int(seed), 3).chance(0, 0.3, 2) for seed in seeds]
    curve = reliability([([math.log(chance) for chance in chances], (arrivals.argmin(1) == 0).tolist())])
    assert sum(one["nodes"] for one in curve) == len(seeds)
    for one in curve:
        assert one["accepted"] == pytest.approx(one["chance"], abs=4 * math.sqrt(0.25 / one["nodes"]))
