"""What goes in and out of an engine at one step: plain arrays of target and draft batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from redraft.engines.features import Features

BESIDE_STREAMS, MOST_BESIDE = 2, 256
"""Beside sequences that decode, a step takes one in so many of the rows that it may take, and at most so many: each row
delays them all, on a GPU beyond its spare arithmetic."""


def step_rows(prefill_chunk: int, decoding: int) -> int:
    """Most prompt rows of a step in which `decoding` sequences decode: what the scheduler fills and engines prepare."""
    return min(max(prefill_chunk // BESIDE_STREAMS, 1), MOST_BESIDE) if decoding else prefill_chunk


@dataclass
class TargetBatch:
    """One step's rows of B sequences, back to back: T rows, of which R want logits. All arrays are int32.

    Per sequence b: rows row_offsets[b] to row_offsets[b+1] are written at cache rows cache_lengths[b] and up, after
    the m = commit_offsets[b+1] - commit_offsets[b] rows commit_src (ascending, relative to cache_lengths[b] - m) of
    the previous step have been moved into place. Bit j of a row's tree_mask: row j of its sequence is visible; a row
    whose words are all zero is causal.
    """

    input_ids: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    row_offsets: np.ndarray  # [B+1]
    slots: np.ndarray  # [B]
    cache_lengths: np.ndarray  # [B]
    tree_mask: np.ndarray  # [T, words]
    commit_src: np.ndarray  # [C]
    commit_offsets: np.ndarray  # [B+1]
    logit_rows: np.ndarray  # [R]

    @classmethod
    def chains(
        cls,
        input_ids: np.ndarray,
        slots: np.ndarray,
        cache_lengths: np.ndarray,
        mask_words: int,
        logit_rows: np.ndarray | None = None,
    ) -> TargetBatch:
        """N new tokens, input_ids [B, N], of each of B sequences after the first `cache_lengths` [B] of their slots
        [B]: causal rows, nothing to commit. `logit_rows` are all rows unless given."""
        sequences, rows = input_ids.shape
        count = sequences * rows
        int32 = partial(np.ascontiguousarray, dtype=np.int32)
        return cls(
            input_ids=int32(input_ids.ravel()),
            positions=int32((np.asarray(cache_lengths)[:, None] + np.arange(rows)).ravel()),
            row_offsets=np.arange(0, count + 1, rows, dtype=np.int32),
            slots=int32(slots),
            cache_lengths=int32(cache_lengths),
            tree_mask=np.zeros((count, mask_words), np.int32),
            commit_src=np.zeros(0, np.int32),
            commit_offsets=np.zeros(sequences + 1, np.int32),
            logit_rows=np.arange(count, dtype=np.int32) if logit_rows is None else int32(logit_rows),
        )

    @classmethod
    def causal(cls, sequences: int, rows: int, context: int, mask_words: int) -> TargetBatch:
        """Tokens 0, 1, ... as `rows` new ones of each of the slots 0, 1, ... over `context` cached ones, for timing."""
        ids = np.arange(sequences * rows).reshape(sequences, rows)
        return cls.chains(ids, np.arange(sequences), np.full(sequences, context), mask_words)


@dataclass
class DraftBatch:
    """Where B sequences draft from: pairs of a token's features and the token after it, P in all, back to back. A
    sequence's last pair holds its root.

    A drafter with a context takes every pair that it has not ingested, rows row_offsets[b] to row_offsets[b+1], and
    keeps them at rows cache_lengths[b] and up of its own cache. Any other takes only the last pair (P = B).
    """

    features: Features  # [P, F], float32 where it is an array
    tokens: np.ndarray  # int32 [P]
    row_offsets: np.ndarray  # int32 [B+1]
    slots: np.ndarray  # int32 [B]
    cache_lengths: np.ndarray  # int32 [B]

    @classmethod
    def of_roots(cls, features: Features, tokens: np.ndarray) -> DraftBatch:
        """One pair per sequence, in slots 0, 1, ...: features [B, F], root tokens int32 [B]."""
        count = len(tokens)
        rows = np.arange(count + 1, dtype=np.int32)
        return cls(features, tokens, rows, rows[:-1], np.zeros(count, np.int32))


@dataclass
class SharedNoise:
    """The noise that the target will draw B sequences' next tokens with, so that drafters can guess by it.

    `positions` are the output positions of the roots' children. Temperature 0 is greedy: there is no noise. The filters
    are each request's own; `sharpness` is beta in a candidate's score, softmax(beta (log p + g)).
    """

    seeds: np.ndarray  # uint64 [B]
    positions: np.ndarray  # int32 [B]
    temperature: np.ndarray  # float32 [B], 0 or more
    top_k: np.ndarray  # int32 [B], 0: all
    top_p: np.ndarray  # float32 [B], 1: all
    sharpness: np.ndarray  # float32 [B]

    @classmethod
    def none(cls, count: int) -> SharedNoise:
        """That of greedy sequences."""
        zeros, ones = np.zeros(count, np.int32), np.ones(count, np.float32)
        return cls(np.zeros(count, np.uint64), zeros, np.zeros(count, np.float32), zeros, ones, ones)


@dataclass
class DraftCandidates:
    """What a drafter proposes for B sequences: L levels of W expanded nodes with K candidates each.

    `parents[b, l, w]` is the flat candidate (w' * K + k) of level l-1 that expanded node w of level l is; level 0
    expands only the root (w = 0); the others' log-probabilities are -inf there.
    """

    candidates: np.ndarray  # int32 [B, L, W, K], target vocabulary ids
    log_probs: np.ndarray  # float32 [B, L, W, K], cumulative from the root; with noise, of scores; -inf where absent
    parents: np.ndarray  # int32 [B, L, W]
    raw_logits: np.ndarray | None = None  # float32 [B, L, K], of a chain: what re-sampling starts from

    def of(self, group: list[int]) -> DraftCandidates:
        """The candidates of the sequences at these ascending indices."""
        if len(group) == len(self.candidates):
            return self
        return DraftCandidates(self.candidates[group], self.log_probs[group], self.parents[group])


@dataclass
class DraftSampling:
    """How a random drafter is to draw for B sequences: its noise, and each request's own filters.

    The drafter turns the logits of M tokens per expanded node (the hot vocabulary, or the most probable) into the
    distribution p: divided by the temperature, top-k, then top-p, renormalized. `noise` is standard Gumbel, its rows
    level by level as the construction's shape says (see `redraft.decoding.random_trees.DrawShape`). Temperature 0 is
    greedy: the most likely tokens are taken instead of drawn ones, without noise, and p is that of temperature 1.
    """

    noise: np.ndarray  # float32 [B, R, M]
    temperature: np.ndarray  # float32 [B], 0 or more
    top_k: np.ndarray  # int32 [B], 0: all
    top_p: np.ndarray  # float32 [B], 1: all


@dataclass
class DraftDraws:
    """What a random drafter draws for B sequences: D draws, level by level, in draw order within a level.

    Node 0 is the root and draw d is node d + 1; the first E nodes, all but the last level's, are expanded. Draw d took
    entry m of node e, where e, m = divmod(draws[b, d], M); -1: nothing was left to draw. Repeats are draws of their
    own. `log_probs` is p as drawn from: -inf where a token cannot be drawn, so everywhere at a node that is not there.
    The arrays stay valid until the next call.
    """

    ids: np.ndarray  # int32 [B, E, M], target vocabulary ids, distinct within a node
    log_probs: np.ndarray  # float32 [B, E, M]
    draws: np.ndarray  # int32 [B, D]
