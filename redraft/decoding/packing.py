"""ReDrafter's dynamic tree attention (section 3.3, appendix A.1): shared prefixes of beams as tensor operations."""

from __future__ import annotations

import numpy as np

from redraft.decoding.token_tree import TokenTree


def dedup_prefix(beams: np.ndarray) -> np.ndarray:
    """The smallest beam index with the same prefix, for each prefix of each beam.

    beams int32 [B, W, L] -> int32 [B, W, L]; entry [b, i, k] is the smallest j with
    beams[b, i, :k+1] == beams[b, j, :k+1].
    """
    length = beams.shape[2]
    matches = beams[:, :, None, :] == beams[:, None, :, :]
    same_prefix = np.cumsum(matches, axis=3, dtype=np.int32) == np.arange(1, length + 1, dtype=np.int32)
    return np.argmax(same_prefix, axis=2).astype(np.int32)


def pack_beams(roots: np.ndarray, beams: np.ndarray, log_probs: np.ndarray | None = None) -> TokenTree:
    """Beams of one length as draft trees without repeated prefixes.

    roots int32 [B], beams int32 [B, W, L], log_probs float32 [B, W, L] cumulative from the root (-inf: no beam; absent:
    0). Nodes stand in beam order, the root first.
    """
    batch, width, length = beams.shape
    if log_probs is None:
        log_probs = np.zeros(beams.shape, dtype=np.float32)
    itself = np.broadcast_to(np.arange(width, dtype=np.int32)[:, None], beams.shape)
    prefix = dedup_prefix(beams)
    unique = (prefix == itself) & np.isfinite(log_probs[:, :, -1:])
    flat_unique = unique.reshape(batch, width * length)
    node = np.cumsum(flat_unique, axis=1, dtype=np.int32).reshape(batch, width, length)
    shared_node = np.take_along_axis(node, prefix, axis=1)
    parent = np.concatenate([np.zeros((batch, width, 1), np.int32), shared_node[:, :, :-1]], axis=2)

    sizes = 1 + flat_unique.sum(axis=1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    sequence, beam, depth = np.nonzero(unique)
    row = offsets[sequence] + node[sequence, beam, depth]
    count = offsets[-1]
    tokens, parents, scores = np.zeros(count, np.int32), np.full(count, -1, np.int32), np.zeros(count)
    tokens[offsets[:-1]] = roots
    tokens[row] = beams[sequence, beam, depth]
    parents[row] = parent[sequence, beam, depth]
    scores[row] = log_probs[sequence, beam, depth]
    return TokenTree(offsets, tokens, parents, scores)
