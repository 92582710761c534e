"""Random draws from a drafter: noise keyed by position, the requests' filters, and one level of each construction.

The level functions are what a drafter network unrolls; here they are plain numpy, the reference that networks are
tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_NOISE_KEY = 0x67756D62656C
"""Second key word of this noise, which is numpy's Philox-4x64. It shares nothing with `redraft.decoding.noise`."""


def gumbel_noise(seed: int, position: int, rows: int, support: int) -> np.ndarray:
    """Standard Gumbel noise float32 [rows, support] of the step whose first new token has output position `position`.

    Every step has a first position of its own, so no noise is used twice; it depends on nothing but these arguments.
    """
    key, counter = (np.array(words, dtype=np.uint64) for words in ((seed, _NOISE_KEY), (0, position, 0, 0)))
    words = np.random.Philox(key=key, counter=counter).random_raw(rows * support)
    uniforms = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniforms)).astype(np.float32).reshape(rows, support)


def filter_log_probs(logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The distribution that a drafter draws from: log-probabilities float32 [B, N, M], -inf where filtered out.

    logits float32 [B, N, M], -inf where absent; temperature float32 [B] (0, greedy, filters as 1 does), top_k int32 [B]
    (0: all), top_p float32 [B] (1: all): as the target's `Sampler` filters, the fewest tokens that hold top_p of what
    top-k leaves.
    """
    scaled = logits.astype(np.float64) / np.where(temperature > 0, temperature, 1)[:, None, None]
    order = np.argsort(-scaled, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1)
    limits = np.where(top_k > 0, top_k, logits.shape[-1])[:, None, None]
    scaled = np.where(ranks < limits, scaled, -np.inf)
    probs = np.take_along_axis(np.exp(log_softmax(scaled)), order, axis=-1)
    before = np.take_along_axis(np.cumsum(probs, axis=-1) - probs, ranks, axis=-1)
    kept = (before < top_p[:, None, None]) | (top_p >= 1)[:, None, None]
    return log_softmax(np.where(kept, scaled, -np.inf)).astype(np.float32)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 over the last axis; all -inf where all scores are."""
    scores = scores.astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    shifted = scores - np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - np.where(np.isfinite(top), total, 0.0)


def gumbel_top_k(log_probs: np.ndarray, noise: np.ndarray, count: int, greedy: np.ndarray | None = None) -> np.ndarray:
    """`count` draws without replacement from every node (RSD-C: RSD, algorithm 4).

    log_probs and noise float32 [B, N, M]. Flat draws int32 [B, N * count], each node's in draw order, -1 where its
    support is exhausted. `greedy` bool [B]: sequences that take the most likely tokens instead; None: no sequence does.
    """
    batch, nodes, support = log_probs.shape
    best, values = _top(_perturbed(log_probs, noise, greedy), count)
    flat = best + np.arange(nodes)[:, None] * support
    return np.where(np.isfinite(values), flat, -1).reshape(batch, nodes * count).astype(np.int32)


def independent(log_probs: np.ndarray, noise: np.ndarray, count: int, greedy: np.ndarray | None = None) -> np.ndarray:
    """One draw for each of `count` independent sequences, all from the root or each from a node of its own (SpecTr).

    log_probs float32 [B, 1 or count, M], noise float32 [B, count, M]. Flat draws int32 [B, count], repeats kept.
    `greedy` bool [B]: sequences that take the most likely tokens instead, `count` different ones at the root.
    """
    _, nodes, support = log_probs.shape
    perturbed = _perturbed(log_probs, noise, greedy)
    flat = perturbed.argmax(axis=-1) + (np.arange(count) if nodes > 1 else 0) * support
    draws = np.where(np.isfinite(perturbed.max(axis=-1)), flat, -1).astype(np.int32)
    if greedy is None or nodes > 1:
        return draws
    return np.where(greedy[:, None], gumbel_top_k(log_probs, noise[:, :1], count, greedy), draws)


@dataclass
class Beam:
    """What stochastic beam search knows of the nodes that a level expands."""

    totals: np.ndarray
    """float32 [B, N], log-probability of each path; -inf where there is no node."""
    gumbels: np.ndarray
    """float32 [B, N], its perturbed value, at most its parent's; descending."""

    @classmethod
    def of_roots(cls, batch: int) -> Beam:
        """Only the root, N = 1."""
        return cls(np.zeros((batch, 1), np.float32), np.zeros((batch, 1), np.float32))


def stochastic_beam(
    log_probs: np.ndarray, noise: np.ndarray, beam: Beam, count: int, greedy: np.ndarray | None = None
) -> tuple[np.ndarray, Beam]:
    """The `count` best children of all nodes: paths drawn without replacement (RSD-S: RSD, algorithm 9).

    log_probs and noise float32 [B, N, M]. Flat draws int32 [B, count], best first, -1 where none are left, and their
    beam. The k best of a level are children of the k best of the level before. `greedy` bool [B]: sequences that take
    the most likely paths instead (a beam search), which are then their own perturbed values.
    """
    batch = len(log_probs)
    totals = beam.totals[..., None] + log_probs
    gumbels = truncated_gumbels(totals + noise, beam.gumbels)
    if greedy is not None:
        gumbels = np.where(greedy[:, None, None], totals, gumbels)
    draws, values = _top(gumbels.reshape(batch, -1), count)
    is_drawn = np.isfinite(values)
    totals = np.take_along_axis(totals.reshape(batch, -1), draws, axis=1)
    return np.where(is_drawn, draws, -1).astype(np.int32), Beam(np.where(is_drawn, totals, -np.inf), values)


def truncated_gumbels(perturbed: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Perturbed log-probabilities float32 [B, N, M] conditioned on their maxima being `bounds` float32 [B, N].

    Monotone, and the maximum becomes the bound (RSD, equation 10, in the stable form of Kool et al. 2019, B.3).
    """
    wide, bounds = perturbed.astype(np.float64), bounds[..., None].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = bounds - wide + np.log1p(-np.exp(wide - wide.max(axis=-1, keepdims=True)))
        truncated = bounds - np.maximum(excess, 0) - np.log1p(np.exp(-np.abs(excess)))
    return np.where(np.isfinite(perturbed), truncated, -np.inf).astype(np.float32)


def _perturbed(log_probs: np.ndarray, noise: np.ndarray, greedy: np.ndarray | None) -> np.ndarray:
    return log_probs + (noise if greedy is None else np.where(greedy[:, None, None], np.float32(0), noise))


def _top(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and values of the `count` largest along the last axis, largest first; padded with value -inf."""
    indices = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, count - indices.shape[-1])]
    largest = np.take_along_axis(values, indices, axis=-1)
    return np.pad(indices, padding), np.pad(largest, padding, constant_values=-np.inf)
