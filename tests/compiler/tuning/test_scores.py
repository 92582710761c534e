"""The fit of node scores: what made the data is found again."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.compiler.tuning.scores import (
    Drafted,
    Guess,
    Visited,
    fit_chances,
    fit_joint_odds,
    fit_ngram_odds,
    fit_sharpness,
    fit_slope,
    guesses,
    matches,
    visited,
)
from redraft.decoding.defaults import JOINT_ODDS, NGRAM_CHANCES
from redraft.decoding.growth import joint_odds
from redraft.decoding.scores import NgramScores, Scores

SUPPORT, TEMPERATURE = 57, 0.7
JOINT = JOINT_ODDS[False]
BEFORE = Scores(temperature=TEMPERATURE, slope=1.1, sharpness=0.8)


def nodes_of(slope: float, sharpness: float, candidates: int, count: int = 3000) -> list[tuple[Visited, np.ndarray]]:
    """Nodes at which candidates come with the chances softmax(beta (slope log p + g)), and sometimes another token."""
    rng = np.random.default_rng(7)
    log_p = np.log(rng.dirichlet(np.full(SUPPORT, 0.3), count) + 1e-9)
    noise = rng.gumbel(size=log_p.shape)
    chances = np.exp(sharpness * TEMPERATURE * (slope * log_p + noise))
    chances /= chances.sum(1, keepdims=True)
    scores = BEFORE.beta(TEMPERATURE) * (BEFORE.slope * log_p + noise)
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    found = []
    for own, given, g in zip(chances, scores, noise, strict=True):
        best = np.argsort(-given)[:candidates]
        found.append((Visited(0, int(rng.choice(SUPPORT, p=own)), best, given[best]), g[best]))
    return found


@pytest.mark.parametrize(("slope", "sharpness", "candidates"), [(1.0, 0.6, 9), (1.3, 1.2, SUPPORT), (0.8, 0.9, 9)])
def test_the_slope_is_found(slope, sharpness, candidates):
    found = fit_slope(nodes_of(slope, sharpness, candidates), BEFORE, TEMPERATURE)
    assert found == pytest.approx(slope, abs=0.11)


@pytest.mark.parametrize(("sharpness", "candidates"), [(0.6, SUPPORT), (1.2, SUPPORT), (0.8, 9), (1.1, 9)])
def test_the_sharpness_is_found(sharpness, candidates):
    nodes = [node for node, _ in nodes_of(BEFORE.slope, sharpness, candidates)]
    assert fit_sharpness(nodes, BEFORE.sharpness, SUPPORT) == pytest.approx(sharpness, abs=0.06)


def test_the_odds_of_ngrams_are_found():
    """By themselves, and joined with a drafter's scores."""
    rng = np.random.default_rng(3)
    for factor, drafts in ((0.4, False), (1.5, True)):
        found = []
        for prior in rng.choice([0.36, 0.62, 0.9], 4000):
            guess = Guess(float(prior), float(rng.uniform(0, 0.5)) if drafts else None, False)
            odds = factor * prior / (1 - prior)
            if guess.neural is not None:
                odds = joint_odds(odds / (1 + odds), guess.neural, JOINT)
            found.append(guess._replace(came=bool(rng.random() < odds / (1 + odds))))
        assert fit_ngram_odds(found, JOINT) == pytest.approx(factor, rel=0.13)


@pytest.mark.parametrize("joint", [(0.2, 0.6), (1.2, 6.0)])
def test_how_guesses_are_joined_is_found(joint):
    """By the chances that the factors make, whatever other pair makes nearly the same."""
    rng = np.random.default_rng(5)
    pairs = [(float(prior), float(rng.uniform(0, 0.6))) for prior in rng.choice([0.36, 0.62, 0.9], 4000)]
    chances = [(odds := joint_odds(*pair, joint)) / (1 + odds) for pair in pairs]
    seen = [(Guess(*pair, bool(rng.random() < chance)), 1.0) for pair, chance in zip(pairs, chances, strict=True)]
    fitted = fit_joint_odds(seen)
    assert fitted is not None
    again = [(odds := joint_odds(*pair, fitted)) / (1 + odds) for pair in pairs]
    assert np.abs(np.array(again) - chances).mean() < 0.02


def test_chances_of_ngrams_are_counted_beside_the_defaults():
    seen = [(2, 1, True)] * 900 + [(2, 1, False)] * 100 + [(6, 4, False)] * 4
    chances = fit_chances(seen)
    assert chances[2][0] == pytest.approx(0.9, abs=0.02)
    assert chances[6][3] == pytest.approx(0.99 * 32 / 36, abs=0.001), "four guesses say little"
    assert chances[1] == NGRAM_CHANCES[1]
    NgramScores(chances=fit_chances([(length, 4, True) for length in NGRAM_CHANCES] * 10_000))


def test_every_guess_in_an_answer_is_seen():
    assert list(matches([2, 3, 7, 5], [2, 3, 9])) == [(1, 1, True), (2, 1, False)], "3 after 2, 7 after 2 and 3"


def test_few_records_fit_nothing():
    nodes = nodes_of(1.0, 0.8, 9, 20)
    assert fit_slope(nodes, BEFORE, TEMPERATURE) is None
    assert fit_sharpness([node for node, _ in nodes], BEFORE.sharpness, SUPPORT) is None
    assert fit_ngram_odds([Guess(0.5, None, True)] * 9, JOINT) is None
    assert fit_joint_odds([(Guess(0.5, 0.5, True), 1.0)] * 9) is None


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
    prompt, answer = [2, 3, 7, 5], [2, 3, 7, 6]
    found = list(guesses(prompt, answer, {2: DRAFTED}, NGRAM_CHANCES))
    assert [(guess.prior, guess.came) for guess in found] == [(NGRAM_CHANCES[2][0], True), (NGRAM_CHANCES[3][0], False)]
    assert [guess.neural for guess in found] == [pytest.approx(0.25), pytest.approx(0.5)]
    everywhere = list(guesses(prompt, answer, {}, NGRAM_CHANCES))
    assert [guess.came for guess in everywhere] == [True, True, False], "3 after 2, 7 after 3, 5 after 7"
    assert all(guess.neural is None for guess in everywhere)
