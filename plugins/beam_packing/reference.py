"""What `PackBeams` computes, in torch: the trees of `redraft/decoding/packing.py`, which packs on the CPU, and what
engines derive from them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.decoding import packing
from redraft.decoding.token_tree import MASK_BITS, mask_words


def pack_beams(roots: Tensor, beams: Tensor, log_probs: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]:
    """roots int32 [B], beams int32 and log_probs float32 [B, W, L], cache_lengths int32 [B] to tokens, parents,
    positions, tree_mask, scores and sizes: see README.md."""
    batch, width, length = beams.shape
    nodes = 1 + width * length
    words = -(-nodes // MASK_BITS)
    tree = packing.pack_beams(roots.numpy(), beams.numpy(), log_probs.numpy())
    tokens, parents, scores = (
        F.pad(torch.from_numpy(array), (0, nodes - array.shape[1]), value=past_end)
        for array, past_end in ((tree.tokens, 0), (tree.parents, -1), (tree.scores, float("-inf")))
    )
    positions = torch.zeros(batch, nodes, dtype=torch.int32)
    masks = np.zeros((batch, nodes, words), np.uint32)
    for b, paths in enumerate(tree.ancestors):
        positions[b, : len(paths)] = cache_lengths[b] + torch.tensor([path.bit_count() - 1 for path in paths])
        masks[b, : len(paths)] = np.reshape(mask_words(paths, words), (-1, words))
    return tokens, parents, positions, torch.from_numpy(masks.view(np.int32)), scores, torch.from_numpy(tree.sizes)
