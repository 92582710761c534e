"""The default of 15 nodes: with its root, a tree fills the rows that padded backends execute."""

from __future__ import annotations

import pytest

from redraft.bundle.config import LimitsInfo
from redraft.bundle.method import MethodConfig
from redraft.engines.cuda.buckets import fitting, step_buckets
from redraft.engines.tensorrt import profiles

LIMITS = LimitsInfo(slots=64, max_len=2048, max_tree=64, prefill_chunk=512)
TREE = MethodConfig().tree_budget + 1


def torch_rows(sequences: int, rows: int) -> int:
    bucket = fitting(step_buckets(LIMITS), sequences, rows, rows)
    assert bucket is not None
    return bucket.rows


def plugin_rows(sequences: int, rows: int) -> int:
    buckets = profiles.plugin_target(LIMITS)
    return buckets.steps[buckets.fitting(sequences, rows)].all_rows


def native_rows(sequences: int, rows: int) -> int:
    buckets = profiles.native_target(LIMITS, True)
    return buckets.steps[buckets.fitting(sequences, -(-rows // sequences))].all_rows


@pytest.mark.parametrize("executed", [torch_rows, plugin_rows, native_rows])
@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16, 32, 64])
def test_trees_of_the_default_budget_fill_a_bucket(executed, sequences):
    rows = sequences * TREE
    assert executed(sequences, rows) == rows
    assert executed(sequences, rows + sequences) >= 1.25 * rows, "one more node each is padded to many"
