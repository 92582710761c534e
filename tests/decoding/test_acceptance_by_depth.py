"""How often trees of random draws are accepted at each depth, against theory: enumerated for two levels of a vocabulary
of three, without Gumbel noise. Lossless trees may still be worse than their law says; here they would show."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from redraft.batch import DraftSampling
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, pack_draws
from redraft.decoding.rejection import recursive_rejection
from redraft.decoding.token_tree import NodeDraws
from tests.decoding.laws import drawn, marginal, outcome, without_replacement
from tests.toy_drafter import reference_draws

TREES = 6000
P = {(): (0.6, 0.3, 0.1), (0,): (0.2, 0.7, 0.1), (1,): (0.5, 0.1, 0.4), (2,): (0.1, 0.1, 0.8)}
Q = {(): (0.3, 0.3, 0.4), (0,): (0.6, 0.1, 0.3), (1,): (0.2, 0.5, 0.3), (2,): (0.3, 0.6, 0.1)}
Rates = np.ndarray
"""float64 [2], chances that a step accepts at depth 1 and at depth 2."""


def log(p) -> np.ndarray:
    return np.log(np.array(p, np.float32))


def accepting(draws: NodeDraws, path: tuple[int, ...]) -> list[float]:
    """The chance of each draw to be the one that is accepted."""
    left, found = 1.0, []
    for chance in outcome(recursive_rejection, np.array(Q[path]), draws)[0]:
        found.append(left * chance)
        left *= 1 - chance
    return found


def expected(first: list[int], below: dict[int, float]) -> Rates:
    """Of a tree with the draws `first` at the root, each with its chance `below` to accept at depth 2."""
    chances = accepting(drawn(first, log(P[()])), ())
    return np.array([sum(chances), sum(chance * below[token] for token, chance in zip(first, chances, strict=True))])


def theory_of_branching(width: int) -> Rates:
    """RSD-C: every node has its own draws."""
    below = {
        token: marginal(recursive_rejection, without_replacement, np.array(Q[token,]), log(P[token,]), width)[1]
        for token in range(3)
    }
    return sum(chance * expected(list(first), below) for first, chance in without_replacement(log(P[()]), width))


def paths_without_replacement() -> Iterator[tuple[tuple[tuple[int, int], ...], float]]:
    """The first four of all paths in the order of a draw without replacement, and its probability."""
    names = [(a, b) for a in range(3) for b in range(3)]
    for order, chance in without_replacement(np.log([P[()][a] * P[a,][b] for a, b in names]), 4):
        yield tuple(names[place] for place in order), chance


def theory_of_beams(width: int) -> Rates:
    """RSD-S with K = 2: the paths drawn first are its leaves, and its first level the prefixes in their order (two are
    among any four paths)."""
    assert width == 2
    total = np.zeros(2)
    for paths, chance in paths_without_replacement():
        first = list(dict.fromkeys(a for a, _ in paths))[:width]
        leaves = {token: [b for a, b in paths[:width] if a == token] for token in first}
        below = {
            token: sum(accepting(drawn(places, log(P[token,])), (token,))) if places else 0.0
            for token, places in leaves.items()
        }
        total += chance * expected(first, below)
    return total


@pytest.mark.parametrize(
    ("construction", "theory"), [("gumbel_top_k", theory_of_branching), ("stochastic_beam", theory_of_beams)]
)
def test_acceptance_by_depth_is_what_theory_says(construction, theory):
    levels = (2, 2)
    shape = RANDOM_CONSTRUCTIONS[construction].shape(levels)
    noise = np.random.default_rng(5).gumbel(size=(TREES, sum(shape.noise_rows), 3)).astype(np.float32)
    ones = np.ones(TREES, np.float32)
    draws = reference_draws(
        construction, levels, [0] * TREES, DraftSampling(noise, ones, np.zeros(TREES, np.int32), ones),
        lambda _, path: (np.arange(3, dtype=np.int32), log(P[tuple(path[1:])])),
    )  # fmt: skip
    everything = shape.within(np.full(TREES, 9, np.int32), np.full(TREES, 9, np.int32))
    trees = pack_draws(draws, np.zeros(TREES, np.int32), everything)
    rates = np.zeros((TREES, 2))
    for place, nodes in enumerate(trees.draws):
        root = nodes[0]
        for child, entry, chance in zip(root.children, root.entries, accepting(root, ()), strict=True):
            below = sum(accepting(nodes[child], (entry,))) if child in nodes else 0.0
            rates[place] += chance, chance * below
    error = rates.std(axis=0) / np.sqrt(TREES)
    assert (np.abs(rates.mean(axis=0) - theory(2)) < 4 * error).all(), (rates.mean(axis=0), theory(2), error)
