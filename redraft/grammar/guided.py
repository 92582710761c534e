"""Draft trees under a grammar: without what it forbids, with what it forces."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.decoding.token_tree import Node, TokenTree
from redraft.grammar.state import GrammarState, TokenPath


def guided_trees(tree: TokenTree, grammars: Sequence[GrammarState | None], most: int) -> TokenTree:
    """Draft trees with the `guided_nodes` of those that have a grammar. The others keep their draws."""
    pairs = list(zip(tree.nodes, grammars, strict=True))
    guided = TokenTree.from_nodes(
        [nodes if grammar is None else guided_nodes(nodes, grammar, most) for nodes, grammar in pairs]
    )
    if tree.draws is not None:
        guided.draws = [draws if grammar is None else {} for draws, grammar in zip(tree.draws, grammars, strict=True)]
    return guided


def guided_nodes(nodes: list[Node], grammar: GrammarState, most: int) -> list[Node]:
    """A draft tree's nodes that the grammar allows, and after each of them up to `most` tokens that it forces there, as
    nodes as likely as the one before. Verification judges these like any other draft: they are the usual tokens of the
    forced bytes, which the masks need not share. What is dropped or joined here changes how far a walk comes, never
    which tokens it takes. The grammar is asked at most twice for each node that is given.
    """
    kept: list[Node] = [nodes[0]]
    paths: list[TokenPath] = [()]
    index_of = {0: 0}
    node_of: dict[tuple[int, int], int] = {}

    def add(token: int, parent: int, score: float) -> int:
        node = node_of.setdefault((parent, token), len(kept))
        if node == len(kept):
            kept.append((token, parent, score))
            paths.append((*paths[parent], token))
        elif score > kept[node][2]:
            kept[node] = token, parent, score
        return node

    for node, (token, parent, score) in enumerate(nodes[1:], 1):
        above = index_of.get(parent)
        if above is not None and grammar.mask(paths[above])[token]:
            index_of[node] = add(token, above, score)
    passed = set[int]()
    for node in range(len(kept)):
        if node not in passed:
            for token in grammar.forced(paths[node])[:most]:
                node = add(token, node, kept[node][2])
                passed.add(node)
    return kept
