"""Draft trees of a batch, and what an engine and a verifier derive from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MASK_BITS = 32


@dataclass
class NodeDraws:
    """What was drawn below one node, in draw order, and the draft distribution p that it was drawn from."""

    children: list[int]
    """The drawn nodes; a token that was drawn again stands again."""
    places: list[int]
    """Of each draw, its place in `ids`."""
    ids: np.ndarray
    """int32 [M], the tokens that could be drawn."""
    draft_log_probs: np.ndarray
    """float32 [M], their log-probabilities before any draw."""


@dataclass
class TokenTree:
    """B draft trees of up to N nodes. Node 0 is the root: the last token that is certain. Parents come before children.

    `draws`, per sequence the draws below each expanded node, is there only for trees of random draws.
    """

    tokens: np.ndarray
    """int32 [B, N]; 0 past a tree's end."""
    parents: np.ndarray
    """int32 [B, N]; -1 at the root and past a tree's end."""
    sizes: np.ndarray
    """int32 [B], nodes of each tree, root included."""
    scores: np.ndarray | None = None
    """float32 [B, N], estimated log-probability that a node is accepted; 0 at the root, -inf past the end."""
    draws: list[dict[int, NodeDraws]] | None = None

    @classmethod
    def root_only(cls, roots: np.ndarray) -> TokenTree:
        """Trees without draft tokens from the root tokens int32 [B]."""
        batch = len(roots)
        return cls(
            tokens=np.asarray(roots, dtype=np.int32).reshape(batch, 1),
            parents=np.full((batch, 1), -1, dtype=np.int32),
            sizes=np.ones(batch, dtype=np.int32),
            scores=np.zeros((batch, 1), dtype=np.float32),
        )

    @classmethod
    def from_nodes(cls, trees: Sequence[Sequence[tuple[int, int, float]]]) -> TokenTree:
        """Trees from one list of (token, parent, score) per sequence, root first."""
        width = max(len(nodes) for nodes in trees)
        padded = [[*nodes, *([(0, -1, -np.inf)] * (width - len(nodes)))] for nodes in trees]
        tokens, parents, scores = zip(*(zip(*nodes, strict=True) for nodes in padded), strict=True)
        return cls(
            tokens=np.array(tokens, dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
            sizes=np.array([len(nodes) for nodes in trees], dtype=np.int32),
            scores=np.array(scores, dtype=np.float32),
        )

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [B, N], whether a node exists."""
        return np.arange(self.tokens.shape[1]) < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> list[list[int]]:
        """Per tree and node, the path from the root to it, both included, as a set of bits: bit j is node j."""
        paths = []
        for size, parents in zip(self.sizes.tolist(), self.parents.tolist(), strict=True):
            path = [1]
            for node in range(1, size):
                path.append(path[parents[node]] | 1 << node)
            paths.append(path)
        return paths

    @cached_property
    def depth(self) -> np.ndarray:
        """int32 [B, N], 0 at the root; -1 past a tree's end."""
        width = self.tokens.shape[1]
        depths = [[path.bit_count() - 1 for path in paths] + [-1] * (width - len(paths)) for paths in self.ancestors]
        return np.array(depths, dtype=np.int32).reshape(self.tokens.shape)

    def mask_words(self, words: int) -> np.ndarray:
        """int32 [B, N, words], the ancestors: bit j of word w is node 32 w + j.

        Raises ValueError if the trees have more nodes than `words` holds.
        """
        batch, width = self.tokens.shape
        if width > words * MASK_BITS:
            raise ValueError(f"{width} tree nodes do not fit {words} mask words of {MASK_BITS} bits")
        size = words * MASK_BITS // 8
        octets = b"".join(
            b"".join(path.to_bytes(size, "little") for path in paths) + bytes(size * (width - len(paths)))
            for paths in self.ancestors
        )
        return np.frombuffer(octets, dtype="<i4").reshape(batch, width, words)

    def unpacked_rows(self) -> np.ndarray:
        """int32 [B], rows that the target would execute if each root-to-leaf path had rows of its own."""
        rows = []
        for paths, parents in zip(self.ancestors, self.parents.tolist(), strict=True):
            inner = set(parents)
            rows.append(1 + sum(path.bit_count() - 1 for node, path in enumerate(paths) if node not in inner))
        return np.array(rows, dtype=np.int32)


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree per sequence from several of the same root: nodes that share a prefix become one, with the best score.

    Serves the prefix removal over beams (each beam a chain), an n-gram branch beside a neural tree, and the fusion of a
    re-sampled tree. Merging forgets draws: only `greedy` and `sampled_walk` are lossless on a merged tree.
    Raises ValueError if the roots differ.
    """
    if len(trees) == 1:
        return trees[0]
    if any((tree.tokens[:, 0] != trees[0].tokens[:, 0]).any() for tree in trees[1:]):
        raise ValueError("trees to merge must have the same roots")
    merged = []
    for sequence, root in enumerate(trees[0].tokens[:, 0].tolist()):
        nodes: list[tuple[int, int, float]] = [(root, -1, 0.0)]
        known: dict[tuple[int, int], int] = {}
        for tree in trees:
            _insert(tree, sequence, nodes, known)
        merged.append(nodes)
    return TokenTree.from_nodes(merged)


def _insert(
    tree: TokenTree, sequence: int, nodes: list[tuple[int, int, float]], known: dict[tuple[int, int], int]
) -> None:
    size = int(tree.sizes[sequence])
    scores = tree.scores[sequence, :size].tolist() if tree.scores is not None else [0.0] * size
    tokens, parents = tree.tokens[sequence, :size].tolist(), tree.parents[sequence, :size].tolist()
    place = [0] * size
    for index in range(1, size):
        token, parent, score = tokens[index], place[parents[index]], scores[index]
        found = known.get((parent, token))
        if found is None:
            place[index] = known[parent, token] = len(nodes)
            nodes.append((token, parent, score))
        else:
            place[index] = found
            if score > nodes[found][2]:
                nodes[found] = (token, parent, score)


def prune_tree(tree: TokenTree, budgets: np.ndarray, max_depths: np.ndarray | None = None) -> TokenTree:
    """The best-scored nodes of each tree: at most `budgets` int32 [B] drafted ones, none deeper than `max_depths`.

    A node's score counts at most as much as its parent's, so the kept nodes are closed under parents. Cutting by score
    is lossless with `greedy` and `sampled_walk` only.
    """
    pruned = []
    for sequence, (budget, size) in enumerate(zip(budgets.tolist(), tree.sizes.tolist(), strict=True)):
        limit = size if max_depths is None else int(max_depths[sequence])
        pruned.append(_best_nodes(tree, sequence, size, budget, limit))
    return TokenTree.from_nodes(pruned)


def _best_nodes(tree: TokenTree, sequence: int, size: int, budget: int, max_depth: int) -> list[tuple[int, int, float]]:
    tokens, parents = tree.tokens[sequence, :size].tolist(), tree.parents[sequence, :size].tolist()
    scores = tree.scores[sequence, :size].tolist() if tree.scores is not None else [0.0] * size
    depths = [0] * size
    for node in range(1, size):
        parent = parents[node]
        depths[node] = depths[parent] + 1
        scores[node] = min(scores[node], scores[parent])
    order = sorted((node for node in range(1, size) if depths[node] <= max_depth), key=lambda node: -scores[node])
    place = {0: 0}
    for node in sorted(order[:budget]):
        place[node] = len(place)
    return [(tokens[node], place.get(parents[node], -1), scores[node]) for node in place]
