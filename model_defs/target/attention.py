"""Attention over context for eager execution: RoPE, and a dense preallocated cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model_defs.target.config import TargetConfig


def rope_table(config: TargetConfig, length: int) -> Tensor:
    """float32 [length, head_size]: cosines in the first half of a row, sines in the second."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope.inverse_frequencies(config.head_size))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [..., heads, head_size] by rows `table` [..., head_size], pairing i with i + head_size / 2."""
    cos, sin = table.to(x.dtype).unsqueeze(-2).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def split_qkv(qkv: Tensor, config: TargetConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[..., fused] to q [..., heads, head_size], k and v [..., kv_heads, head_size]."""
    q, k, v = qkv.unflatten(-1, (-1, config.head_size)).split(
        [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=-2
    )
    return q, k, v


class DenseCache:
    """A preallocated cache for B sequences that eager execution attends through.

    Rows of all sequences advance together; `starts` [B] is each sequence's length before the call.
    Attention is causal: row i of sequence b stands at position starts[b] + i.
    """

    def __init__(self, config: TargetConfig, batch: int, length: int, like: Tensor):
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_size)
        self.config = config
        self.k = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.v = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.table = rope_table(config, length).to(like.device)
        self.starts = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.longest: int | None = None
        """Rows of the longest sequence after a call; None: each call looks it up, and so waits for a GPU."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """The target's `attend` for rows [B, N, fused] at positions starts + 0..N-1."""
        batch, rows = qkv.shape[:2]
        positions = self.starts[:, None] + torch.arange(rows, device=qkv.device)
        longest = int(positions.max()) + 1 if self.longest is None else self.longest
        kv_heads = self.config.num_kv_heads
        q, k, v = split_qkv(qkv, self.config)
        table = self.table[positions]
        q, k = apply_rope(q, table), apply_rope(k, table)
        batch_index = torch.arange(batch, device=qkv.device)[:, None]
        self.k[layer].transpose(1, 2)[batch_index, positions] = k
        self.v[layer].transpose(1, 2)[batch_index, positions] = v
        visible = torch.arange(longest, device=qkv.device) <= positions[..., None]
        group = self.config.num_heads // kv_heads
        out = F.scaled_dot_product_attention(
            q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3),
            self.k[layer, :, :, :longest],
            self.v[layer, :, :, :longest],
            attn_mask=visible.repeat(1, group, 1)[:, None],
        )
        return out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2)


def causal_attend(config: TargetConfig, rows: int, device: torch.device | str = "cpu"):
    """An `attend` without cache, for whole sequences [B, rows] from position 0."""
    table = rope_table(config, rows).to(device)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = split_qkv(qkv, config)
        q, k = apply_rope(q, table), apply_rope(k, table)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

    return attend
