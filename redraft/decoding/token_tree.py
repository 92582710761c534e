"""Draft trees of a batch, and what an engine and a verifier derive from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from redraft.plugins.trees.native import pointer

MASK_BITS = 32

Node = tuple[int, int, float]
"""Token, parent and score: see the arrays of `TokenTree`."""


@dataclass
class NodeDraws:
    """What was drawn below one node, in draw order, and the draft distribution p that it was drawn from."""

    children: list[int]
    """The drawn nodes; a token that was drawn again stands again."""
    entries: list[int]
    """Each draw's index in `ids`."""
    ids: np.ndarray
    """int32 [M], the tokens that could be drawn."""
    draft_log_probs: np.ndarray
    """float32 [M], their log-probabilities before any draw."""


class TokenTree:
    """B draft trees. Node 0 is the root: the last token that is certain. Parents come before children.

    Trees are lists of nodes, or arrays of all trees' nodes back to back; each form is made from the other when it is
    first asked for. `draws`, per sequence the draws below each expanded node, is there only for trees of random draws.
    """

    draws: list[dict[int, NodeDraws]] | None = None

    def __init__(self, offsets: np.ndarray, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray):
        """Trees from their arrays, see below."""
        self.offsets, self.tokens, self.parents, self.scores = offsets, tokens, parents, scores

    @classmethod
    def from_nodes(cls, trees: Sequence[list[Node]]) -> TokenTree:
        """Trees from one list of (token, parent, score) per sequence, root first."""
        tree = cls.__new__(cls)
        tree.nodes = list(trees)
        return tree

    @classmethod
    def root_only(cls, roots: Iterable[int]) -> TokenTree:
        """Trees without draft tokens from the root tokens [B]."""
        tokens = np.array([*roots], np.int32)
        offsets, parents, scores = _arrays_of_roots(len(tokens))
        return cls(offsets.copy(), tokens, parents.copy(), scores.copy())

    def __len__(self) -> int:
        """Trees."""
        return len(self.offsets) - 1

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """Each tree's nodes, root first."""
        nodes = list(zip(self.tokens.tolist(), self.parents.tolist(), self.scores.tolist(), strict=True))
        return [nodes[start:end] for start, end in pairwise(self.offsets.tolist())]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int32 [B + 1]: the nodes of tree b are those from offsets[b] to offsets[b + 1] of the arrays, T in all."""
        return np.array([0, *accumulate(map(len, self.nodes))], np.int32)

    @cached_property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""
        return np.array([token for nodes in self.nodes for token, _, _ in nodes], np.int32)

    @cached_property
    def parents(self) -> np.ndarray:
        """int32 [T], counted within the tree; -1 at a root."""
        return np.array([parent for nodes in self.nodes for _, parent, _ in nodes], np.int32)

    @cached_property
    def scores(self) -> np.ndarray:
        """float64 [T], estimated log-probability that a node is accepted; 0 at a root."""
        return np.array([score for nodes in self.nodes for _, _, score in nodes], np.float64)

    @cached_property
    def promises(self) -> list[float]:
        """Nodes of each tree that should be accepted by their scores: the sum of these as chances."""
        chances = ((math.exp(score) for _, _, score in nodes[1:]) for nodes in self.nodes)
        # From left to right: `sum` corrects for rounding from Python 3.12 on.
        return [[*accumulate(each, initial=0.0)][-1] for each in chances]

    @cached_property
    def addresses(self) -> tuple[Any, ...]:
        """The arrays `offsets`, `tokens`, `parents` and `scores`, as compiled functions take them."""
        offsets, tokens = pointer(self.offsets, np.int32), pointer(self.tokens, np.int32)
        return offsets, tokens, pointer(self.parents, np.int32), pointer(self.scores, np.float64)

    @property
    def sizes(self) -> np.ndarray:
        """int32 [B], nodes of each tree, root included."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def ancestors(self) -> list[list[int]]:
        """Per tree and node, the path from the root to it, both included, as a set of bits: bit j is node j.

        A node's depth, 0 at the root, is the number of its bits less one.
        """
        paths = []
        for nodes in self.nodes:
            path = [1]
            for node, (_, parent, _) in enumerate(nodes[1:], 1):
                path.append(path[parent] | 1 << node)
            paths.append(path)
        return paths

    def of(self, group: Sequence[int] | np.ndarray) -> TokenTree:
        """The trees at these indices, in this order, without draws."""
        sizes, starts = self.sizes[group], self.offsets[:-1][group]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        rows = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        return TokenTree(offsets, self.tokens[rows], self.parents[rows], self.scores[rows])


@lru_cache(maxsize=256)
def _arrays_of_roots(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays `offsets`, `parents` and `scores` of trees that are a root each, to be copied: to make them takes
    longer than all else that a step without drafts does to its trees."""
    return np.arange(count + 1, dtype=np.int32), np.full(count, -1, np.int32), np.zeros(count)


def mask_width(rows: int) -> int:
    """int32 words of one row of a tree mask over `rows` rows: a bit for each."""
    return -(-rows // MASK_BITS)


def mask_words(paths: Sequence[int], words: int) -> list[int]:
    """Sets of bits as `words` unsigned words each: bit j of word w is bit 32 w + j.

    Raises ValueError if a set has a bit that `words` does not hold.
    """
    nodes = max(paths, default=0).bit_length()
    if nodes > words * MASK_BITS:
        raise ValueError(f"{nodes} tree nodes do not fit {words} mask words of {MASK_BITS} bits")
    return [path >> MASK_BITS * word & 0xFFFFFFFF for path in paths for word in range(words)]


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree per sequence from several of the same root: nodes that share a prefix become one, with the best score.

    Serves an n-gram branch beside a neural tree, and the fusion of a
    re-sampled tree. Merging forgets draws: only `greedy` and `sampled_walk` are lossless on a merged tree.
    Raises ValueError if the roots differ.
    """
    if len(trees) == 1:
        return trees[0]
    merged = []
    for same in zip(*(tree.nodes for tree in trees), strict=True):
        root = same[0][0]
        nodes: list[Node] = [root]
        node_of: dict[tuple[int, int], int] = {}
        for other in same:
            if other[0][0] != root[0]:
                raise ValueError(f"trees to merge must have the same roots, got tokens {root[0]} and {other[0][0]}")
            _insert(other, nodes, node_of)
        merged.append(nodes)
    return TokenTree.from_nodes(merged)


def join_trees(parts: Sequence[tuple[Sequence[int], TokenTree]]) -> TokenTree:
    """The trees of several groups of sequences as one batch: each group with its sequences' places in it."""
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([indices for indices, _ in parts]))
    sizes = np.concatenate([tree.sizes for _, tree in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    columns = ([getattr(tree, name) for _, tree in parts] for name in ("tokens", "parents", "scores"))
    joined = TokenTree(offsets, *map(np.concatenate, columns)).of(order)
    draws = [drawn for _, tree in parts for drawn in tree.draws or [{}] * len(tree)]
    if any(draws):
        joined.draws = [draws[index] for index in order]
    return joined


def follow(nodes: list[Node], tokens: Sequence[int]) -> list[int]:
    """The nodes of a tree along the longest part of a path of tokens below the root that it holds."""
    child_at = {(parent, token): node for node, (token, parent, _) in enumerate(nodes)}
    path: list[int] = []
    for token in tokens:
        node = child_at.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return path


def _insert(other: list[Node], nodes: list[Node], node_of: dict[tuple[int, int], int]) -> None:
    index_of = [0]
    for token, above, score in other[1:]:
        parent = index_of[above]
        node = node_of.setdefault((parent, token), len(nodes))
        index_of.append(node)
        if node == len(nodes):
            nodes.append((token, parent, score))
        elif score > nodes[node][2]:
            nodes[node] = (token, parent, score)


def prune_tree(
    tree: TokenTree,
    budgets: Iterable[int],
    max_depths: Iterable[int] | None = None,
    least: Iterable[float] | None = None,
) -> TokenTree:
    """The best-scored nodes of each tree: at most `budgets` [B] drafted ones, none deeper than `max_depths` [B] or of a
    score below `least` [B].

    A node's score counts at most as much as its parent's, so the kept nodes are closed under parents. Cutting by score
    is lossless with `greedy` and `sampled_walk` only. Trees within the limits stay as they are, draws included; the
    others' draws are forgotten.
    """
    depths = map(len, tree.nodes) if max_depths is None else max_depths
    scores = [-math.inf] * len(tree.nodes) if least is None else least
    pruned = [_best_nodes(*limits) for limits in zip(tree.nodes, budgets, depths, scores, strict=True)]
    same = [after is before for after, before in zip(pruned, tree.nodes, strict=True)]
    if all(same):
        return tree
    result = TokenTree.from_nodes(pruned)
    if tree.draws is not None:
        result.draws = [draws if kept else {} for draws, kept in zip(tree.draws, same, strict=True)]
    return result


def without_tokens(tree: TokenTree, tokens: AbstractSet[int]) -> TokenTree:
    """The trees without drafted nodes of these tokens, and without what is below them. Draws are forgotten, so only
    `greedy` and `sampled_walk` are lossless on the result."""
    unwanted = np.isin(tree.tokens, list(tokens)) & (tree.parents >= 0)
    if not unwanted.any():
        return tree
    return TokenTree.from_nodes([_nodes_without(nodes, tokens) for nodes in tree.nodes])


def _nodes_without(nodes: list[Node], tokens: AbstractSet[int]) -> list[Node]:
    index_of, kept = {0: 0}, nodes[:1]
    for node, (token, parent, score) in enumerate(nodes[1:], 1):
        if parent in index_of and token not in tokens:
            index_of[node] = len(kept)
            kept.append((token, index_of[parent], score))
    return kept


def shared_budgets(tree: TokenTree, total: int) -> list[int]:
    """Per tree, how many of the batch's `total` most likely drafted nodes are its own: a sequence whose next tokens are
    surer than another's gets more of the rows."""
    ranked = sorted((-score, b) for b, nodes in enumerate(tree.nodes) for _, _, score in nodes[1:])
    taken = Counter(b for _, b in ranked[:total])
    return [taken[b] for b in range(len(tree.nodes))]


def _best_nodes(nodes: list[Node], budget: int, max_depth: int, least: float) -> list[Node]:
    if len(nodes) - 1 <= min(budget, max_depth) and least == -math.inf:
        return nodes
    depths, scores = [0], [nodes[0][2]]
    for _, parent, score in nodes[1:]:
        depths.append(depths[parent] + 1)
        scores.append(min(score, scores[parent]))
    if len(nodes) - 1 <= budget and max(depths) <= max_depth and min(scores) >= least:
        return nodes
    within = [node for node in range(1, len(nodes)) if depths[node] <= max_depth and scores[node] >= least]
    kept = [0, *sorted(sorted(within, key=lambda node: -scores[node])[:budget])]
    index_of = {node: index for index, node in enumerate(kept)}
    return [(nodes[node][0], index_of.get(nodes[node][1], -1), scores[node]) for node in kept]
