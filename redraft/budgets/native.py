"""The choice in compiled code, without the interpreter's lock: bit for bit that of `redraft.budgets.choice`, which is
the algorithm to read, and the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft.budgets.choice import Choice
from redraft.budgets.cost import TimesByNodes
from redraft.decoding.token_tree import TokenTree
from redraft.plugins.trees.native import call, pointer


def choose_nodes(tree: TokenTree, ratios: Sequence[float], tokens: float, times: TimesByNodes, probes: bool) -> Choice:
    """Do as `redraft.budgets.choice.choose_nodes`."""
    count, table = len(tree), times.table
    if len(ratios) != count:
        raise ValueError(f"expected {count} ratios, got {len(ratios)}")
    rows, seconds = np.array(table.rows, np.int64), np.array(table.seconds)
    factors, counts, result = np.array(ratios), np.empty(count, np.int32), np.empty(3)
    call(
        "trees_choose",
        *(count, pointer(tree.offsets, np.int32), pointer(tree.scores, np.float64), pointer(factors, np.float64)),
        *(tokens, probes, pointer(rows, np.int64), pointer(seconds, np.float64), len(rows), table.padded),
        *(times.rows, times.factor, times.more_s, pointer(counts, np.int32), pointer(result, np.float64)),
    )
    return Choice(counts.tolist(), *result.tolist())


def promised_nodes(tree: TokenTree) -> list[float]:
    """Do as `redraft.budgets.choice.promised_nodes`."""
    promised = np.empty(len(tree))
    arrays = pointer(tree.offsets, np.int32), pointer(tree.scores, np.float64), pointer(promised, np.float64)
    call("trees_promise", len(tree), *arrays)
    return promised.tolist()
