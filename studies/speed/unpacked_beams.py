"""Beams without packing (ReDrafter, figure 6, right): each beam has rows of its own, whatever prefix it shares.

The product always packs. `register` makes the construction selectable as `beam_unpacked`, in methods of this process
only. Its trees repeat tokens below a node; the walk then follows the longest beam that matches.
"""

from __future__ import annotations

import math

import numpy as np

from redraft.batch import DraftCandidates
from redraft.decoding.construction import Draws, beams_of, register_construction
from redraft.decoding.token_tree import Node, TokenTree

BEAM_UNPACKED = "beam_unpacked"


def unpacked(roots: np.ndarray, beams: np.ndarray, log_probs: np.ndarray) -> TokenTree:
    """Draft trees in which beams share only the root. Arguments: see `redraft.decoding.packing.pack_beams`."""
    trees = []
    for root, tokens, scores in zip(roots.tolist(), beams.tolist(), log_probs.tolist(), strict=True):
        nodes: list[Node] = [(root, -1, 0.0)]
        for beam, beam_scores in zip(tokens, scores, strict=True):
            if beam_scores[-1] == -math.inf:  # an absent beam
                continue
            parents = [0, *range(len(nodes), len(nodes) + len(beam) - 1)]
            nodes += zip(beam, parents, beam_scores, strict=True)
        trees.append(nodes)
    return TokenTree.from_nodes(trees)


def unpacked_beams(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """The beams of the construction `beam`, unpacked."""
    return unpacked(roots, *beams_of(drafts, drafts.candidates.shape[2]))


def register() -> None:
    """Make the construction selectable."""
    register_construction(BEAM_UNPACKED, Draws.TOP)(unpacked_beams)
