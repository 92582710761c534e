"""What `PackBeams` computes: a trie of each sequence's beams, grown beam by beam."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from redraft.decoding.token_tree import MASK_BITS


def pack_beams(roots: Tensor, beams: Tensor, log_probs: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]:
    """roots int32 [B], beams int32 and log_probs float32 [B, W, L], cache_lengths int32 [B] to tokens, parents,
    positions, tree_mask, scores and sizes: see README.md."""
    batch, width, length = beams.shape
    nodes = 1 + width * length
    tokens, positions = torch.zeros(2, batch, nodes, dtype=torch.int32)
    parents, sizes = torch.full((batch, nodes), -1, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    scores = torch.full((batch, nodes), -math.inf)
    sees = torch.zeros(batch, nodes, -(-nodes // MASK_BITS) * MASK_BITS, dtype=torch.bool)
    for b in range(batch):
        tokens[b, 0], positions[b, 0], scores[b, 0], sees[b, 0, 0] = roots[b], cache_lengths[b], 0, True
        node_of: dict[tuple[int, ...], int] = {(): 0}
        for beam, log_prob in zip(beams[b].tolist(), log_probs[b].tolist(), strict=True):
            for depth in range(1, length + 1 if log_prob[-1] > -math.inf else 0):
                *before, token = prefix = tuple(beam[:depth])
                if prefix not in node_of:
                    parent, node = node_of[tuple(before)], node_of.setdefault(prefix, len(node_of))
                    tokens[b, node], parents[b, node], scores[b, node] = token, parent, log_prob[depth - 1]
                    positions[b, node] = positions[b, parent] + 1
                    sees[b, node] = sees[b, parent]
                    sees[b, node, node] = True
        sizes[b] = len(node_of)
    bits = sees.unflatten(2, (-1, MASK_BITS)).int() << torch.arange(MASK_BITS, dtype=torch.int32)
    return tokens, parents, positions, bits.sum(3, dtype=torch.int32), scores, sizes
