"""The reference of `PairRows` and `DraftRows` in torch: part of a drafter's module, and so of exported programs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 32


def pair_rows(tokens: Tensor, row_offsets: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]:
    """tokens int32 [P], row_offsets int32 [B + 1], cache_lengths int32 [B] to positions [P], last_rows, contexts, roots
    and sequences [B], all int32: see README.md. Pairs after the last sequence's are padding, at position 0."""
    rows = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    sequences = torch.arange(cache_lengths.shape[0], dtype=torch.int32, device=tokens.device)
    begins, ends = row_offsets[sequences], row_offsets[sequences + 1]
    owners = (rows[:, None] >= ends).sum(-1).clamp(max=cache_lengths.shape[0] - 1)
    positions = torch.where(rows < ends[-1], cache_lengths[owners] + rows - begins[owners], 0)
    return positions.to(torch.int32), ends - 1, cache_lengths + ends - begins, tokens[ends - 1], sequences


def draft_rows(contexts: Tensor, *grown: Tensor, level: int, first: int, width: int, words: int) -> tuple[Tensor, ...]:
    """contexts int32 [B] and, after the first level of a tree, origins int32 [B * W] and that level's tree_mask, to
    positions [B * W], row_offsets [B + 1], tree_mask [B * W, words] and starts [B], all int32: see README.md."""
    batch, device = contexts.shape[0], contexts.device
    positions = (contexts[:, None] + (level - 1)).expand(-1, width).flatten()
    row_offsets = width * torch.arange(batch + 1, dtype=torch.int32, device=device)
    bits, own = torch.arange(BITS * words, device=device), first + torch.arange(width, device=device)
    mask = pack_bits(own[:, None] == bits).repeat(batch, 1)
    if grown:
        origins, before = grown
        mask = mask | F.pad(before[origins], (0, words - before.shape[1]))
    return positions, row_offsets, mask, contexts + first


def pack_bits(bits: Tensor) -> Tensor:
    """bool [n, 32 words] to int32 [n, words], the lowest bits first. Made on the tensor's device: a stream that is
    captured as a CUDA graph takes no copy from the host."""
    values = 1 << torch.arange(BITS, dtype=torch.int32, device=bits.device)
    return (bits.unflatten(-1, (-1, BITS)) * values).sum(-1, dtype=torch.int32)
