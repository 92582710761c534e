"""Draft trees of random draws: their shapes, how a budget cuts them, and packing what a drafter drew.

Where a verifier weighs the draws, a cut is decided before they are seen: by draw order and by level. Any rule that
looks at a draw before it keeps it (its probability, or whether it repeats another) changes the law of the kept draws,
and verification would be biased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redraft.batch import DraftDraws
from redraft.decoding.construction import Draws
from redraft.decoding.token_tree import NodeDraws, TokenTree


@dataclass(frozen=True)
class DrawShape:
    """What is fixed about a construction's D draws: how many on each level, their noise and their order."""

    widths: tuple[int, ...]
    """Draws of each level; each is a node that the next level expands."""
    noise_rows: tuple[int, ...]
    """Rows of Gumbel noise of each level: one per expanded node, or one per draw."""
    ranks: tuple[tuple[int, ...], ...]
    """Per level and draw, how late it comes: at least as late as its parent, and later than its earlier siblings."""

    @cached_property
    def cut_order(self) -> np.ndarray:
        """int64 [D], the draws in the order in which they are kept: neither deep nor late ones first."""
        lateness = [level + rank for level, ranks in enumerate(self.ranks) for rank in ranks]
        return np.argsort(lateness, kind="stable")

    @cached_property
    def levels(self) -> np.ndarray:
        """int64 [D], the level of each draw, 0 below the root."""
        return np.repeat(np.arange(len(self.widths)), self.widths)

    def within(self, budgets: np.ndarray, max_depths: np.ndarray) -> np.ndarray:
        """bool [B, D]: at most `budgets` int32 [B] draws, in draw order at each node, none deeper than `max_depths`."""
        allowed = self.levels < max_depths[:, None]
        within = np.cumsum(allowed[:, self.cut_order], axis=1) <= budgets[:, None]
        kept = np.empty_like(allowed)
        kept[:, self.cut_order] = within
        return kept & allowed


@dataclass(frozen=True)
class RandomConstruction:
    """A way to draw trees at random; `shape` gives what is fixed from the configured numbers of draws per level.

    The drafter network draws, `pack_draws` makes the tree.
    """

    name: str
    draws: Draws
    shape: Callable[[tuple[int, ...]], DrawShape]
    rule: str
    """What draws a level: a function of `redraft.decoding.draws`, and the attribute of the operator `DrawStep`."""
    levels: tuple[int, ...]
    """The usual numbers of draws per level."""
    verification: str
    """The usual verifier."""


RANDOM_CONSTRUCTIONS: dict[str, RandomConstruction] = {}

ShapeRule = Callable[[tuple[int, ...]], DrawShape]


def register_random_construction(
    name: str, draws: Draws, rule: str, levels: tuple[int, ...], verification: str
) -> Callable[[ShapeRule], ShapeRule]:
    """Decorator that makes a random construction selectable as `name`, from its shape; see `RandomConstruction`."""

    def register(shape: ShapeRule) -> ShapeRule:
        RANDOM_CONSTRUCTIONS[name] = RandomConstruction(name, draws, shape, rule, levels, verification)
        return shape

    return register


@register_random_construction(
    "gumbel_top_k", Draws.WITHOUT_REPLACEMENT, "gumbel_top_k", (4, 2, 1), "recursive_rejection"
)
def branching_shape(levels: tuple[int, ...]) -> DrawShape:
    """RSD-C: `levels` are the branching factors, children of each node."""
    above: tuple[int, ...] = (0,)
    ranks: list[tuple[int, ...]] = []
    for count in levels:
        above = tuple(rank + child for rank in above for child in range(count))
        ranks.append(above)
    widths = tuple(map(len, ranks))
    return DrawShape(widths, (1, *widths[:-1]), tuple(ranks))


@register_random_construction(
    "stochastic_beam", Draws.WITHOUT_REPLACEMENT, "stochastic_beam", (4, 4, 4, 4), "recursive_rejection"
)
def beam_shape(levels: tuple[int, ...]) -> DrawShape:
    """RSD-S: `levels` are the beam widths. Draw k of a level descends from one of draws 0 to k of the level before."""
    return DrawShape(levels, (1, *levels[:-1]), tuple(tuple(range(count)) for count in levels))


@register_random_construction("independent", Draws.INDEPENDENT, "independent", (4, 4, 4, 4), "multi_round")
def sequences_shape(levels: tuple[int, ...]) -> DrawShape:
    """SpecTr, SpecInfer: as many independent sequences as each level has draws. Raises ValueError for uneven levels."""
    if len(set(levels)) > 1:
        raise ValueError(f"independent sequences need as many draws on every level, got {levels}")
    return DrawShape(levels, levels, tuple(tuple(range(count)) for count in levels))


@register_random_construction("random_chain", Draws.SINGLE, "independent", (1, 1, 1, 1), "rejection")
def chain_shape(levels: tuple[int, ...]) -> DrawShape:
    """Speculative sampling: one sequence. Raises ValueError for a level of more than one draw."""
    if set(levels) - {1}:
        raise ValueError(f"a random chain has one draw on every level, got {levels}")
    return sequences_shape(levels)


def pack_draws(drafts: DraftDraws, roots: np.ndarray, kept: np.ndarray) -> TokenTree:
    """Draft trees of the draws that are `kept` bool [B, D], below the roots int32 [B]; equal paths become one node.

    Every kept draw, repeats included, stands in its parent's `draws`; -1 draws are left out. Sequences that share a
    path are expanded each for itself. Where that gives other bits (a row's place in the batch may change them), only
    the first expansion's draws are kept: all draws of a node come from one distribution. None is left out for what was
    drawn.
    """
    batch, _, support = drafts.ids.shape
    flat = np.maximum(drafts.draws, 0)
    tokens = np.take_along_axis(drafts.ids.reshape(batch, -1), flat, axis=1).tolist()
    log_probs = np.take_along_axis(drafts.log_probs.reshape(batch, -1), flat, axis=1).tolist()
    trees, draws = [], []
    for sequence, root in enumerate(roots.tolist()):
        nodes: list[tuple[int, int, float]] = [(root, -1, 0.0)]
        node_of = {0: 0}
        node_of_token: dict[tuple[int, int], int] = {}
        expansion: dict[int, int] = {}
        drawn: dict[int, NodeDraws] = {}
        for draw, index in enumerate(drafts.draws[sequence].tolist()):
            expanded, entry = divmod(index, support)
            if index < 0 or not kept[sequence, draw] or expanded not in node_of:
                continue
            parent, token = node_of[expanded], tokens[sequence][draw]
            first = expansion.setdefault(parent, expanded)
            if first != expanded and not _same_bits(drafts, sequence, first, expanded):
                continue
            node = node_of_token.get((parent, token))
            if node is None:
                node = node_of_token[parent, token] = len(nodes)
                nodes.append((token, parent, nodes[parent][2] + log_probs[sequence][draw]))
            if parent not in drawn:
                drawn[parent] = NodeDraws([], [], drafts.ids[sequence, expanded], drafts.log_probs[sequence, expanded])
            drawn[parent].children.append(node)
            drawn[parent].entries.append(entry)
            node_of[draw + 1] = node
        trees.append(nodes)
        draws.append(drawn)
    tree = TokenTree.from_nodes(trees)
    tree.draws = draws
    return tree


def _same_bits(drafts: DraftDraws, sequence: int, node: int, other: int) -> bool:
    """Whether two expanded nodes of a sequence have the same distribution, in the same order."""
    arrays = drafts.ids[sequence], drafts.log_probs[sequence]
    return all(np.array_equal(array[node], array[other]) for array in arrays)
