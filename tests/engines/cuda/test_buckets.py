"""Shape buckets: every decode step and draft fits one, they are few, and padding is bounded."""

from __future__ import annotations

import pytest

from redraft.bundle.config import LimitsInfo
from redraft.engines.cuda.buckets import FINE_FROM, SEQUENCES_FACTOR, Bucket, decode_buckets, draft_buckets, fitting

SHAPES = [(1, 1), (2, 40), (9, 40), (16, 32), (17, 5), (32, 16), (64, 32)]


def limits(slots: int, max_tree: int) -> LimitsInfo:
    return LimitsInfo(slots=slots, max_len=99, max_tree=max_tree, prefill_chunk=16)


@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_every_decode_step_fits_a_bucket_with_little_padding(slots, max_tree):
    buckets = decode_buckets(limits(slots, max_tree))
    assert len(buckets) <= 30
    assert max(bucket.rows for bucket in buckets) == slots * max_tree
    for sequences in range(1, slots + 1):
        for rows in range(sequences, sequences * max_tree + 1):
            bucket = fitting(buckets, sequences, rows)
            assert bucket is not None
            assert bucket.sequences < SEQUENCES_FACTOR * sequences
            assert bucket.rows <= max(2 * rows, SEQUENCES_FACTOR * sequences)
            assert rows <= FINE_FROM or bucket.rows < 1.5 * rows + 1
    assert fitting(buckets, slots, slots * max_tree + 1) is None
    assert fitting(buckets, slots + 1, slots + 1) is None


def test_buckets_of_32_slots():
    assert len(decode_buckets(limits(32, 16))) == 23
    assert len(decode_buckets(limits(16, 32))) == 20
    assert draft_buckets(limits(5, 9), False) == [Bucket(5, 5), Bucket(4, 4), Bucket(2, 2), Bucket(1, 1)]
    assert fitting(decode_buckets(limits(32, 16)), 3, 17) == Bucket(4, 32)


@pytest.mark.parametrize("reads_context", [False, True])
@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_every_draft_of_a_step_fits_a_bucket(slots, max_tree, reads_context):
    """A prompt's pairs fit none."""
    buckets = draft_buckets(limits(slots, max_tree), reads_context)
    for sequences in range(1, slots + 1):
        for pairs in range(sequences, (8 if reads_context else 1) * sequences + 1):
            bucket = fitting(buckets, sequences, pairs)
            assert bucket is not None
            assert bucket.sequences < 2 * sequences
    assert fitting(buckets, 1, 8 * slots + 1) is None


@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_buckets_come_from_the_largest_down(slots, max_tree):
    """So that the graphs of all fit into what the first took."""
    for buckets in (decode_buckets(limits(slots, max_tree)), draft_buckets(limits(slots, max_tree), True)):
        assert [bucket.rows for bucket in buckets] == sorted((bucket.rows for bucket in buckets), reverse=True)
        assert len(set(buckets)) == len(buckets)
