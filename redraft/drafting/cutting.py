"""Cutting drafted trees to their limits, and to the nodes that a step verifies."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.budgets.choice import Choice, Terms, choose_nodes
from redraft.decoding.token_tree import TokenTree, prune_tree, shared_budgets


@dataclass(frozen=True)
class TreeLimits:
    """How far the trees of a batch may go, by sequence: drafted nodes, depth, and a node's least log-probability."""

    nodes: list[int]
    depths: list[int]
    scores: list[float]
    largest: int
    """How many nodes any tree of the batch may have before trees are cut."""
    most: int
    """How many any may have after."""

    def of(self, group: list[int]) -> TreeLimits:
        """The limits of the sequences at these indices."""
        return TreeLimits(
            nodes=[self.nodes[index] for index in group],
            depths=[self.depths[index] for index in group],
            scores=[self.scores[index] for index in group],
            largest=self.largest,
            most=self.most,
        )


def cut_trees(tree: TokenTree, limits: TreeLimits, terms: Terms | None) -> tuple[TokenTree, Choice | None]:
    """The trees within their limits, of which as many nodes are left as `choose_nodes` chooses by the terms.

    Without terms the sequences share their nodes, as one may be surer of its next tokens than another. First goes what
    no tree may have whatever it is given, so that such nodes take no share.
    """
    nodes = limits.nodes if terms else [limits.most] * len(tree)
    tree = prune_tree(tree, nodes, limits.depths, limits.scores)
    choice = choose_nodes(tree, terms) if terms else None
    return prune_tree(tree, choice.counts if choice else shared_budgets(tree, sum(limits.nodes))), choice
