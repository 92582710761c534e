"""Shape buckets of the torch backend: the sizes that steps and drafts are padded to, a CUDA graph each.

Steps with rows of a prompt have buckets too. Without a graph the host launches kernel after kernel, which takes
longer than the GPU computes, up to some hundred rows of an 8B model.

A call that fits no bucket runs without a graph and without padding: a step of scored prompts with more logit rows than
all trees have, a draft after longer prompts than `prefill_chunk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redraft.batch import step_rows

if TYPE_CHECKING:
    from redraft.bundle.config import LimitsInfo

SEQUENCES_FACTOR = 4
"""Sequences of padding have no rows: they cost attention blocks that end at once."""
FINE_FROM = 128
"""Rows from which on steps are no longer bound by memory, so that padding costs time."""
DRAFT_PAIRS = (4, 8)
"""Pairs per sequence of a drafter with a context: the tokens of one step."""


@dataclass(frozen=True)
class Bucket:
    """Up to `sequences` sequences with up to `rows` rows in all."""

    sequences: int
    rows: int
    logits: int = 0
    """Up to so many logit rows of a target."""


def most_rows(limits: LimitsInfo, sequences: int) -> int:
    """Rows of the scheduler's largest step of up to `sequences` sequences: all decode, or all are prompts, or one is a
    prompt beside the others' trees."""
    others = sequences - 1
    beside = others * limits.max_tree + step_rows(limits.prefill_chunk, decoding=others)
    return max(sequences * limits.max_tree, limits.prefill_chunk, beside)


def step_buckets(limits: LimitsInfo) -> list[Bucket]:
    """Buckets of the target's steps, the largest first: 1, 4, 16, ... sequences, with rows for a tree each, and for
    prompts up to FINE_FROM; with 1 and all sequences up to `most_rows`. Row counts double, and above FINE_FROM grow by
    halves. As many have logits as trees have rows."""
    buckets = set()
    for sequences in _powers(SEQUENCES_FACTOR, 1, limits.slots):
        trees, most = sequences * limits.max_tree, most_rows(limits, sequences)
        if 1 < sequences < limits.slots:
            most = min(most, max(trees, FINE_FROM))
        for rows in (trees, *_row_counts(sequences, most)):
            buckets.add(Bucket(sequences, rows, min(rows, trees)))
    return _largest_first(buckets)


def draft_buckets(limits: LimitsInfo, reads_context: bool) -> list[Bucket]:
    """Buckets of a drafter's calls, the largest first: 1, 2, 4, ... sequences, with one pair each. For a drafter with a
    context DRAFT_PAIRS each, and the most of these beside `max_tree` pairs more, as after a long run of n-grams, or
    beside a prompt of `prefill_chunk` tokens."""
    sequences = _powers(2, 1, limits.slots)
    if not reads_context:
        return _largest_first(Bucket(b, b) for b in sequences)
    few, many = DRAFT_PAIRS
    beside = (limits.max_tree, limits.prefill_chunk)
    counts = {(b, rows) for b in sequences for rows in (few * b, many * b, *(many * b + more for more in beside))}
    return _largest_first(Bucket(b, rows) for b, rows in counts)


def fitting(buckets: Sequence[Bucket], sequences: int, rows: int, logits: int = 0) -> Bucket | None:
    """The bucket with the fewest sequences that holds so many, and of these the one with the fewest rows; None where
    none does."""
    fit = (
        candidate
        for candidate in buckets
        if candidate.sequences >= sequences and candidate.rows >= rows and candidate.logits >= logits
    )
    return min(fit, key=lambda bucket: (bucket.sequences, bucket.rows), default=None)


def _largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    return sorted(buckets, key=lambda bucket: (bucket.rows, bucket.sequences), reverse=True)


def _powers(factor: int, first: int, most: int) -> list[int]:
    """first, first * factor, ... below `most`, and `most`."""
    result = []
    while first < most:
        result.append(first)
        first *= factor
    return [*result, most]


def _row_counts(least: int, most: int) -> list[int]:
    doubling = _powers(2, least, most)
    between = [3 * rows // 2 for rows in doubling if rows >= FINE_FROM and 3 * rows // 2 < most]
    return [*doubling, *between]
