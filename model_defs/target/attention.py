"""Attention over context for eager execution: RoPE, and a dense preallocated cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.target.config import TargetConfig


def rope_tables(config: TargetConfig, length: int, context: int = 0) -> list[Tensor]:
    """A table float32 [length, head_size] for each of the config's `attentions`: cosines in the first half of a row,
    sines in the second. `context` is how many positions sequences have at most (default: `length`)."""
    positions = torch.arange(length, dtype=torch.float32)
    tables = []
    for attention in config.attentions:
        rope, size = attention.rope, config.head_size
        angles = torch.outer(positions, rope.inverse_frequencies(size, context or length))
        scale = torch.ones(size // 2)
        scale[: rope.rotated(size) // 2] = rope.attention_factor or 1.0
        tables.append(torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1))
    return tables


class RopeTables(nn.Module):
    """The tables of all layers, as constants of a network."""

    def __init__(self, config: TargetConfig, length: int, context: int = 0, device: torch.device | str = "cpu"):
        """See `rope_tables`."""
        super().__init__()
        self.config = config
        for kind, table in enumerate(rope_tables(config, length, context)):
            self.register_buffer(f"kind_{kind}", table.to(device), persistent=False)

    def of(self, layer: int) -> Tensor:
        """float32 [length, head_size]."""
        return self.get_buffer(f"kind_{self.config.attention_of(layer)}")


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [..., heads, head_size] by rows `table` [..., head_size], pairing i with i + head_size / 2."""
    cos, sin = table.to(x.dtype).unsqueeze(-2).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in the weight's dtype."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)


class HeadNorms(NamedTuple):
    """RMS norms of query heads and of key heads, before RoPE: weights [head_size] each."""

    query: Tensor
    key: Tensor
    eps: float


def split_qkv(qkv: Tensor, config: TargetConfig, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
    """[..., fused] to q [..., heads, head_size] and k [..., kv_heads, head_size] after their norms, and v."""
    q, k, v = qkv.unflatten(-1, (-1, config.head_size)).split(
        [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=-2
    )
    if norms:
        q, k = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
    return q, k, v


def within_window(visible: Tensor, window: int | None) -> Tensor:
    """bool [..., keys]: of the keys that each row sees, in the order of its path, only the last `window`."""
    if window is None:
        return visible
    later = visible.sum(-1, keepdim=True) - visible.cumsum(-1)
    return visible & (later < window)


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
        self.tables = [table.to(like.device) for table in rope_tables(config, length)]
        self.starts = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.longest: int | None = None
        """Rows of the longest sequence after a call; None: each call looks it up, and so waits for a GPU."""

    def positions(self, rows: int) -> Tensor:
        """int64 [B, rows]: where the next rows stand."""
        return self.starts[:, None] + torch.arange(rows, device=self.starts.device)

    def attend(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """The target's `attend` for rows [B, N, fused] at positions starts + 0..N-1."""
        batch, rows = qkv.shape[:2]
        positions = self.positions(rows)
        longest = int(positions.max()) + 1 if self.longest is None else self.longest
        kv_heads = self.config.num_kv_heads
        q, k, v = split_qkv(qkv, self.config, norms)
        table = self.tables[self.config.attention_of(layer)][positions]
        q, k = apply_rope(q, table), apply_rope(k, table)
        batch_index = torch.arange(batch, device=qkv.device)[:, None]
        self.k[layer].transpose(1, 2)[batch_index, positions] = k
        self.v[layer].transpose(1, 2)[batch_index, positions] = v
        keys, queries = torch.arange(longest, device=qkv.device), positions[..., None]
        visible = within_window(keys <= queries, self.config.window_of(layer))
        group = self.config.num_heads // kv_heads
        out = F.scaled_dot_product_attention(
            q.to(v.dtype).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3),
            self.k[layer, :, :, :longest],
            self.v[layer, :, :, :longest],
            attn_mask=visible.repeat(1, group, 1)[:, None],
        )
        return out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2)


def causal_attend(config: TargetConfig, rows: int, device: torch.device | str = "cpu"):
    """An `attend` without cache, for whole sequences [B, rows] from position 0."""
    tables = [table.to(device) for table in rope_tables(config, rows)]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    masks = [None if kind.window is None else within_window(causal, kind.window) for kind in config.attentions]

    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        kind = config.attention_of(layer)
        q, k, v = split_qkv(qkv, config, norms)
        q, k = apply_rope(q, tables[kind]), apply_rope(k, tables[kind])
        q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
        mask = masks[kind]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    return attend
