"""Exact laws of the verification rules, by enumerating every draw; and how far counts are off a law."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from redraft.decoding.sampling import Distribution
from redraft.decoding.token_tree import NodeDraws

FORBIDDEN = -np.inf


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which chi-square exceeds its mean. Raises AssertionError for an outcome that is
    impossible."""
    kept = expected > 0
    assert not counts[~kept].any(), "an impossible outcome"
    freedom = max(int(kept.sum()) - 1, 1)
    statistic = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    return (statistic - freedom) / np.sqrt(2 * freedom)


def drawn(places, log_probs, ids=None) -> NodeDraws:
    """Draws at one node whose children are numbered 1, 2, ... by token."""
    log_probs = np.asarray(log_probs, np.float32)
    ids = np.arange(len(log_probs), dtype=np.int32) if ids is None else np.asarray(ids, np.int32)
    return NodeDraws([int(place) + 1 for place in places], list(places), ids, log_probs)


def outcome(rule, q: np.ndarray, draws: NodeDraws) -> tuple[list[float], np.ndarray]:
    """Chances of accepting each draw, those before it rejected, and the normalized law of what follows all."""
    chances: list[float] = []

    def reject(chance: float) -> bool:
        chances.append(chance)
        return False

    place, left = rule(q[draws.ids], draws, reject)
    assert place == -1
    assert len(chances) == len(draws.entries)
    bonus = Distribution(None, q.copy(), 1.0)
    bonus.put(draws.ids, left)
    return chances, bonus.weights / bonus.weights.sum()


def law(rule, q: np.ndarray, draws: NodeDraws) -> tuple[np.ndarray, float]:
    """Law [V] of the token that comes out, given these draws, and the chance that it is one of them."""
    chances, residual = outcome(rule, q, draws)
    result, left = np.zeros_like(q), 1.0
    for place, chance in zip(draws.entries, chances, strict=True):
        result[draws.ids[place]] += left * chance
        left *= 1 - chance
    return result + left * residual, 1 - left


def without_replacement(log_probs: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every ordered draw of `count` places (fewer where the support ends) and its probability."""
    log_probs = np.asarray(log_probs, np.float64)
    left = np.isfinite(log_probs)
    if not count or not left.any():
        yield (), 1.0
        return
    p = np.exp(log_probs - log_probs[left].max())
    for place in np.flatnonzero(left):
        rest = log_probs.copy()
        rest[place] = FORBIDDEN
        for others, chance in without_replacement(rest, count - 1):
            yield (int(place), *others), chance * p[place] / p.sum()


def independent(log_probs: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every ordered draw of `count` places with repeats, and its probability."""
    log_probs = np.asarray(log_probs, np.float64)
    p = np.exp(log_probs - log_probs.max())
    p /= p.sum()
    for place in np.flatnonzero(p) if count else []:
        for others, chance in independent(log_probs, count - 1):
            yield (int(place), *others), chance * p[place]
    if not count:
        yield (), 1.0


def marginal(rule, draw_law, q: np.ndarray, log_probs, count: int, ids=None) -> tuple[np.ndarray, float]:
    """Law [V] of the token that comes out over all draws, and the acceptance rate."""
    log_probs = np.asarray(log_probs, np.float32)
    total, rate = np.zeros_like(q), 0.0
    for places, chance in draw_law(log_probs, count):
        token_law, accepted = law(rule, q, drawn(places, log_probs, ids))
        total += chance * token_law
        rate += chance * accepted
    return total, rate
