"""A random drafter on the toy target: the reference of what a drafter network does in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from redraft.batch import DraftBatch, DraftDraws, DraftSampling
from redraft.decoding.draws import Beam, filter_log_probs, gumbel_top_k, independent, stochastic_beam
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from tests.toy_engine import ToyEngine, _mix

Distribution = Callable[[int, list[int]], tuple[np.ndarray, np.ndarray]]


def reference_draws(
    construction: str, levels: tuple[int, ...], roots: Sequence[int], sampling: DraftSampling, support_of: Distribution
) -> DraftDraws:
    """The drafting loop: level by level, the distributions after all paths drawn so far, then the level's draws.

    `support_of(sequence, path)` gives the drafter's M tokens int32 and their logits float32 after a path, root first.
    """
    shape, rule = RANDOM_CONSTRUCTIONS[construction].shape(levels), RANDOM_CONSTRUCTIONS[construction].rule
    greedy = sampling.temperature == 0
    batch, support = len(roots), sampling.noise.shape[2]
    beam, noise_at, first = Beam.of_roots(batch), 0, 0
    paths: list[list[list[int] | None]] = [[[root]] for root in roots]
    all_ids, all_log_probs, all_draws = [], [], []
    for count, width, rows in zip(levels, shape.widths, shape.noise_rows, strict=True):
        nodes = len(paths[0])
        ids = np.zeros((batch, nodes, support), np.int32)
        logits = np.full(ids.shape, -np.inf, np.float32)
        for b, n in np.ndindex(batch, nodes):
            if (path := paths[b][n]) is not None:
                ids[b, n], logits[b, n] = support_of(b, path)
        log_probs = filter_log_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        noise = sampling.noise[:, noise_at : noise_at + rows]
        if rule == "stochastic_beam":
            draws, beam = stochastic_beam(log_probs, noise, beam, count, greedy)
        else:
            draws = (gumbel_top_k if rule == "gumbel_top_k" else independent)(log_probs, noise, count, greedy)
        assert draws.shape == (batch, width)
        taken = np.take_along_axis(ids.reshape(batch, -1), np.maximum(draws, 0), axis=1).tolist()
        paths = [
            [
                [*(paths[b][flat // support] or ()), token] if flat >= 0 else None
                for flat, token in zip(draws[b].tolist(), taken[b], strict=True)
            ]
            for b in range(batch)
        ]
        all_ids.append(ids)
        all_log_probs.append(log_probs)
        all_draws.append(np.where(draws >= 0, draws + first * support, -1))
        first, noise_at = first + nodes, noise_at + rows
    return DraftDraws(
        *(np.concatenate(parts, axis=1) for parts in (all_ids, all_log_probs)),
        np.concatenate(all_draws, axis=1).astype(np.int32),
    )


class DrawingToyEngine(ToyEngine):
    """A toy engine whose drafter draws at random, by its own idea of the target's logits, from the `support` tokens
    that it finds most probable. Both models' logits after a path are kept: paths are few."""

    def __init__(self, construction: str, levels: tuple[int, ...], support: int, **options):
        super().__init__(**options)
        self.construction, self.levels, self.support = construction, levels, support
        self._target_logits: dict[int, np.ndarray] = {}
        self._draft_logits: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """The target's and the drafter's logits float32 [V] after a path."""
        target = super().logits_after(state)
        return target, target + np.random.default_rng(state).normal(size=self.vocab_size).astype(np.float32)

    def logits_after(self, state: int) -> np.ndarray:
        if state not in self._target_logits:
            self._target_logits[state], logits = self.logits_of(state)
            ids = np.argsort(-logits, kind="stable")[: self.support].astype(np.int32)
            self._draft_logits[state] = ids, logits[ids]
        return self._target_logits[state]

    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        self.draft_calls += 1
        states = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        roots = batch.tokens.tolist()
        return reference_draws(
            self.construction, self.levels, roots, sampling, lambda b, path: self._support(states[b], path)
        )

    def _support(self, state: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        for token in path:
            state = _mix(state, token)
        self.logits_after(state)
        return self._draft_logits[state]
