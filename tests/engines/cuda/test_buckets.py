"""Shape buckets: every step and draft fits one, they are few, and padding is bounded."""

from __future__ import annotations

import pytest

from redraft.batch import step_rows
from redraft.bundle.config import LimitsInfo
from redraft.engines.cuda.buckets import (
    FINE_FROM,
    SEQUENCES_FACTOR,
    draft_buckets,
    fitting,
    most_rows,
    step_buckets,
)

SHAPES = [(1, 1), (9, 40), (17, 5), (32, 16)]
CHUNKS = (16, 512, 2048)


def limits(slots: int, max_tree: int, prefill_chunk: int = 512) -> LimitsInfo:
    return LimitsInfo(slots=slots, max_len=99, max_tree=max_tree, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_every_decode_step_fits_a_bucket_with_little_padding(slots, max_tree, chunk):
    buckets = step_buckets(limits(slots, max_tree, chunk))
    assert len(buckets) <= 42
    assert max(bucket.logits for bucket in buckets) == slots * max_tree
    for sequences in range(1, slots + 1):
        for rows in range(sequences, sequences * max_tree + 1):
            bucket = fitting(buckets, sequences, rows, rows)
            assert bucket is not None
            assert bucket.sequences < SEQUENCES_FACTOR * sequences
            assert bucket.rows <= max(2 * rows, SEQUENCES_FACTOR * sequences)
            assert rows <= FINE_FROM or bucket.rows < 1.5 * rows + 1
    most = most_rows(limits(slots, max_tree, chunk), slots)
    assert fitting(buckets, slots, most + 1) is None
    assert fitting(buckets, slots, most, slots * max_tree + 1) is None
    assert fitting(buckets, slots + 1, slots + 1) is None


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_every_step_with_prompts_fits_a_bucket(slots, max_tree, chunk):
    """Of prompts and, beside trees, fewer rows of them; the last row of each prompt has logits."""
    buckets = step_buckets(limits(slots, max_tree, chunk))
    for decoding in range(slots):
        for prompts in (1, slots - decoding):
            for rows in range(prompts, step_rows(chunk, decoding) + 1, 7):
                trees = decoding * max_tree
                sequences, all_rows = decoding + prompts, trees + rows
                bucket = fitting(buckets, sequences, all_rows, trees + prompts)
                assert bucket is not None
                assert all_rows <= FINE_FROM or bucket.rows < 1.5 * all_rows + 1
                assert bucket.sequences < SEQUENCES_FACTOR * sequences or bucket.rows > FINE_FROM


@pytest.mark.parametrize("reads_context", [False, True])
@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_every_draft_of_a_step_fits_a_bucket(slots, max_tree, reads_context):
    """For a drafter with a context beside a prompt's pairs too; a longer prompt's fit none."""
    buckets = draft_buckets(limits(slots, max_tree), reads_context)
    for sequences in range(1, slots + 1):
        each, prompt = (8, 512) if reads_context else (1, 0)
        for pairs in (*range(sequences, each * sequences + 1), each * sequences + prompt):
            bucket = fitting(buckets, sequences, pairs)
            assert bucket is not None
            assert bucket.sequences < 2 * sequences
    assert fitting(buckets, 1, each * slots + prompt + 1) is None


@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_a_long_run_of_one_sequence_is_not_padded_to_a_prompt(slots, max_tree):
    """Beside usual ones of the others."""
    buckets = draft_buckets(limits(slots, max_tree), True)
    for sequences in range(1, slots + 1):
        bucket = fitting(buckets, sequences, max_tree + 8 * (sequences - 1))
        assert bucket is not None
        assert bucket.rows <= 8 * bucket.sequences + max_tree


@pytest.mark.parametrize(("slots", "max_tree"), SHAPES)
def test_buckets_come_from_the_largest_down(slots, max_tree):
    """So that the graphs of all fit into what the first took."""
    for buckets in (step_buckets(limits(slots, max_tree)), draft_buckets(limits(slots, max_tree), True)):
        assert [bucket.rows for bucket in buckets] == sorted((bucket.rows for bucket in buckets), reverse=True)
        assert buckets[0].logits == max(bucket.logits for bucket in buckets)
        assert len(set(buckets)) == len(buckets)
