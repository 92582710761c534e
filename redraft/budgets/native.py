"""The choice in compiled code, without the interpreter's lock: bit for bit that of `redraft.budgets.choice`, which is
the algorithm to read, and the oracle of the tests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from redraft.budgets.choice import Choice
from redraft.budgets.cost import TimesByNodes
from redraft.decoding.token_tree import TokenTree
from redraft.plugins.trees.native import address, call, zeros


def choose_nodes(tree: TokenTree, ratios: Sequence[float], tokens: float, times: TimesByNodes, probes: bool) -> Choice:
    """Do as `redraft.budgets.choice.choose_nodes`."""
    count, table = len(tree), times.table
    if len(ratios) != count:
        raise ValueError(f"expected {count} ratios, got {len(ratios)}")
    offsets, _, _, scores = tree.addresses
    rows, seconds, factors = array("q", table.rows), array("d", table.seconds), array("d", ratios)
    counts, result = zeros("i", count), zeros("d", 3)
    call(
        "trees_choose",
        *(count, offsets, scores, address(factors)),
        *(tokens, probes, address(rows), address(seconds), len(rows), table.padded),
        *(times.rows, times.factor, times.more_s, address(counts), address(result)),
    )
    return Choice(counts.tolist(), *result)


def promised_nodes(tree: TokenTree) -> list[float]:
    """Do as `redraft.budgets.choice.promised_nodes`."""
    promised = zeros("d", len(tree))
    offsets, _, _, scores = tree.addresses
    call("trees_promise", len(tree), offsets, scores, address(promised))
    return promised.tolist()
