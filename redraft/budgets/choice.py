"""The choice: the draft nodes of a batch that make the most tokens per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from redraft.budgets.cost import TimesByNodes
from redraft.decoding.token_tree import TokenTree


class Terms(NamedTuple):
    """What a batch's nodes are chosen by."""

    ratios: list[float]
    """The factor of each tree, which turns its nodes' scores into chances."""
    tokens: float
    """What the step yields without these nodes."""
    times: TimesByNodes
    probes: bool
    """Whether to choose as if scores were right: what they promised and did not hold shows only where it is tried
    again. Such a step verifies a node at least."""


@dataclass
class Choice:
    """The nodes to verify, and what they promise."""

    counts: list[int]
    """Nodes of each tree, the best ones."""
    expected: float
    """Nodes of these that should be accepted."""
    promised: float
    """The same by their scores, uncorrected."""
    seconds: float
    """Of the step with them."""


def best_count(chances: Sequence[float], tokens: float, seconds: Sequence[float]) -> int:
    """How many of a batch's nodes to verify, given the chance p of each to be accepted, the best first: the n that
    maximizes

        (tokens + p[0] + ... + p[n - 1]) / seconds[n],

    the expected tokens of the step over its time. `tokens` is what the step yields without drafts, one for each
    sequence; `seconds` [N + 1] is the predicted time with 0 to N nodes. The fewest nodes of equally good counts.

    A node's chance is at most its parent's, so the best nodes of all trees are trees too, and no other n nodes promise
    more. The time may have cliffs: every n is tried.
    """
    expected = accumulate(chances, initial=tokens)
    rates = [count / time for count, time in zip(expected, seconds, strict=True)]
    return rates.index(max(rates))


def choose_nodes(tree: TokenTree, terms: Terms) -> Choice:
    """Choose among all nodes of a batch's trees by `best_count`. Nodes without a chance are never chosen."""
    nodes = [
        (min(score * ratio, 1.0), score, index)
        for index, (drafted, ratio) in enumerate(zip(tree.nodes, terms.ratios, strict=True))
        for score in (math.exp(log) for _, _, log in drafted[1:])
        if score > 0
    ]
    nodes.sort(key=lambda node: -node[0])
    chances, scores, owners = ([node[column] for node in nodes] for column in range(3))
    seconds = [terms.times.at(count) for count in range(len(nodes) + 1)]
    count = best_count(chances, terms.tokens, seconds)
    if terms.probes:
        count = min(max(best_count(scores, terms.tokens, seconds), count, 1), len(nodes))
    taken = Counter(owners[:count])
    return Choice(
        counts=[taken[index] for index in range(len(tree))],
        expected=_sum(chances[:count]),
        promised=_sum(scores[:count]),
        seconds=seconds[count],
    )


def _sum(values: Sequence[float]) -> float:
    """From left to right: `sum` corrects for rounding from Python 3.12 on."""
    return [*accumulate(values, initial=0.0)][-1]
