"""Shape buckets of the torch backend: the sizes that decode steps and drafts are padded to, a CUDA graph each.

Steps with rows that have no logits, most of a prompt's, fit no bucket. They run without a graph and without padding: a
large model's chunk of 512 rows keeps the GPU busy for longer than its kernels take to launch, and chunks come in all
sizes. A scored prompt's rows all have logits: their steps take a bucket that they fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redraft.bundle.config import LimitsInfo

SEQUENCES_FACTOR = 4
"""The attention kernel wants 4 blocks per multiprocessor and splits keys as if every padded sequence had rows. With at
most 4 times the sequences, each multiprocessor still has a block with work."""
FINE_FROM = 128
"""Rows from which on steps are no longer bound by memory, so that padding costs time."""
DRAFT_PAIRS = (4, 8)
"""Pairs per sequence of a drafter with a context: the tokens of one step. A prompt's pairs fit no bucket."""


@dataclass(frozen=True)
class Bucket:
    """Up to `sequences` sequences with up to `rows` rows in all. A target's bucket has as many logit rows."""

    sequences: int
    rows: int


def decode_buckets(limits: LimitsInfo) -> list[Bucket]:
    """Buckets of the target's decode steps, the largest first: 1, 4, 16, ... sequences, with 1 to `max_tree` rows each.
    Row counts double, and above FINE_FROM grow by halves."""
    return _largest_first(
        Bucket(sequences, rows)
        for sequences in _powers(SEQUENCES_FACTOR, 1, limits.slots)
        for rows in _row_counts(sequences, sequences * limits.max_tree)
    )


def draft_buckets(limits: LimitsInfo, reads_context: bool) -> list[Bucket]:
    """Buckets of a drafter's calls, the largest first: 1, 2, 4, ... sequences, with one pair each, or DRAFT_PAIRS for a
    drafter with a context."""
    pairs = DRAFT_PAIRS if reads_context else (1,)
    return _largest_first(Bucket(b, b * count) for b in _powers(2, 1, limits.slots) for count in pairs)


def fitting(buckets: Sequence[Bucket], sequences: int, rows: int) -> Bucket | None:
    """The bucket with the fewest sequences that holds so many, and of these the one with the fewest rows; None where
    none does."""
    fit = (bucket for bucket in buckets if bucket.sequences >= sequences and bucket.rows >= rows)
    return min(fit, key=lambda bucket: (bucket.sequences, bucket.rows), default=None)


def _largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    return sorted(buckets, key=lambda bucket: (bucket.rows, bucket.sequences), reverse=True)


def _powers(factor: int, first: int, most: int) -> list[int]:
    """first, first * factor, ... below `most`, and `most`."""
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return [*found, most]


def _row_counts(least: int, most: int) -> list[int]:
    doubling = _powers(2, least, most)
    between = [3 * rows // 2 for rows in doubling if rows >= FINE_FROM and 3 * rows // 2 < most]
    return [*doubling, *between]
