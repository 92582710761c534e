"""Tree construction: which of a drafter's candidates become the draft tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from redraft.batch import DraftCandidates
from redraft.decoding.packing import pack_beams
from redraft.decoding.token_tree import Node, TokenTree


class Draws(Enum):
    """How a construction chooses its tokens: decides which verifiers are lossless on its trees."""

    TOP = "the most probable tokens (top-k, beams, merged trees)"
    WITHOUT_REPLACEMENT = "random draws without replacement"
    INDEPENDENT = "independent random draws, repeats kept"
    SINGLE = "one random draw after each token"


@dataclass(frozen=True)
class Construction:
    """A way to build draft trees: `build(candidates, roots int32 [B], budget)` gives up to `budget` draft nodes each,
    or more where pruning is left to `prune_tree`."""

    name: str
    draws: Draws
    build: Callable[[DraftCandidates, np.ndarray, int], TokenTree]


CONSTRUCTIONS: dict[str, Construction] = {}


def register_construction(
    name: str, draws: Draws
) -> Callable[[Callable[[DraftCandidates, np.ndarray, int], TokenTree]], Callable]:
    """Decorator that makes a construction selectable in a bundle's configuration as `name`."""

    def register(build: Callable[[DraftCandidates, np.ndarray, int], TokenTree]) -> Callable:
        CONSTRUCTIONS[name] = Construction(name, draws, build)
        return build

    return register


def beams_of(drafts: DraftCandidates, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The `width` best paths of full length, best first: tokens int32 and log-probabilities float32 [B, width, L]."""
    batch, length, expanded, per_node = drafts.candidates.shape
    tokens = drafts.candidates.reshape(batch, length, expanded * per_node)
    scores = drafts.log_probs.reshape(batch, length, expanded * per_node)
    flat = np.argsort(-scores[:, -1], axis=1, kind="stable")[:, :width]
    beams = np.empty((batch, flat.shape[1], length), dtype=np.int32)
    log_probs = np.empty(beams.shape, dtype=np.float32)
    for level in range(length - 1, -1, -1):
        beams[:, :, level] = np.take_along_axis(tokens[:, level], flat, axis=1)
        log_probs[:, :, level] = np.take_along_axis(scores[:, level], flat, axis=1)
        flat = np.take_along_axis(drafts.parents[:, level], flat // per_node, axis=1)
    return beams, log_probs


@register_construction("beam", Draws.TOP)
def beam(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """ReDrafter's beams, shared prefixes removed: as many as the drafter is wide, all of its length."""
    return pack_beams(roots, *beams_of(drafts, drafts.candidates.shape[2]))


@register_construction("chain", Draws.TOP)
def chain(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """Only the best beam."""
    return pack_beams(roots, *beams_of(drafts, 1))


@register_construction("best_first", Draws.TOP)
def best_first(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """The `budget` candidates of highest cumulative probability, over all levels.

    A parent is never less probable than its child and stands before it, so the choice is closed under parents.
    """
    batch, length, expanded, per_node = drafts.candidates.shape
    level_size = expanded * per_node
    size = length * level_size
    drafted = (array.reshape(batch, size).tolist() for array in (drafts.candidates, drafts.log_probs))
    trees = []
    for root, tokens, scores, parents in zip(roots.tolist(), *drafted, drafts.parents.tolist(), strict=True):
        ranked = sorted(range(size), key=scores.__getitem__, reverse=True)[:budget]
        chosen = sorted([flat for flat in ranked if scores[flat] > -math.inf])
        node_of = {flat: node for node, flat in enumerate(chosen, 1)}
        nodes: list[Node] = [(root, -1, 0.0)]
        for flat in chosen:
            level, within = divmod(flat, level_size)
            above = (level - 1) * level_size + parents[level][within // per_node]
            nodes.append((tokens[flat], node_of[above] if level else 0, scores[flat]))
        trees.append(nodes)
    return TokenTree.from_nodes(trees)
