"""The choice in compiled code, without the interpreter's lock: bit for bit that of `redraft.budgets.choice`, which is
the algorithm to read, and the oracle of the tests. Arrays of few entries are of ctypes, which makes and passes them in
less time than numpy."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64

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
    entries = len(table.rows)
    counts, result = (c_int32 * count)(), (c_double * 3)()
    call(
        "trees_choose",
        *(count, pointer(tree.offsets, np.int32), pointer(tree.scores, np.float64), (c_double * count)(*ratios)),
        *(tokens, probes, (c_int64 * entries)(*table.rows), (c_double * entries)(*table.seconds), entries),
        *(table.padded, times.rows, times.factor, times.more_s, counts, result),
    )
    return Choice(counts[:], *result)


def promised_nodes(tree: TokenTree) -> list[float]:
    """Do as `redraft.budgets.choice.promised_nodes`."""
    promised = (c_double * len(tree))()
    call("trees_promise", len(tree), pointer(tree.offsets, np.int32), pointer(tree.scores, np.float64), promised)
    return promised[:]
