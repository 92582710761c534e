"""The reference of `TreeAttention` in torch, row by row. README.md specifies it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_attention(
    qkv: Tensor,
    positions: Tensor,
    row_offsets: Tensor,
    slots: Tensor,
    cache_lengths: Tensor,
    tree_mask: Tensor,
    commit_src: Tensor,
    commit_offsets: Tensor,
    rope_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    window: int = 0,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """Updates the caches in place; returns float [T, num_heads * head_size]. `norms` are those of query and key heads
    [head_size]."""
    out, rows_of_slot = torch.zeros(len(qkv), num_heads * head_size), k_cache.shape[2]
    reading = []
    for b in range(len(slots)):
        begin, end = int(row_offsets[b]), int(row_offsets[b + 1])
        length, start = int(cache_lengths[b]), int((cache_lengths if starts is None else starts)[b])
        commits = commit_src[int(commit_offsets[b]) : int(commit_offsets[b + 1])] if len(commit_offsets) else commit_src
        rows = qkv[begin:end].unflatten(-1, (-1, head_size))
        q, k, v = rows.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if norms:
            q, k = (F.rms_norm(x, (head_size,), norm, norm_eps) for x, norm in zip((q, k), norms, strict=True))
        table = rope_table[positions[begin:end].long(), None]
        for cache, new in ((k_cache[slots[b]], _rope(k, table)), (v_cache[slots[b]], v)):
            base = length - len(commits)
            for j, source in enumerate(commits.tolist()):
                cache[:, (base + j) % rows_of_slot] = cache[:, (base + source) % rows_of_slot]
            cache[:, torch.arange(start, start + end - begin) % rows_of_slot] = new.transpose(0, 1).to(cache.dtype)
        reading.append((b, begin, end, length, start, q, table))
    for b, begin, end, length, start, q, table in reading:
        repeats = num_heads // num_kv_heads
        for i in range(end - begin):
            earlier = start - length
            visible = torch.tensor(visible_rows(tree_mask[begin + i], earlier + i, earlier + end - begin))
            keys = torch.cat([torch.arange(length), length + visible])[-window:]
            seen = (cache[slots[b]][:, keys % rows_of_slot].float() for cache in (k_cache, v_cache))
            k_seen, v_seen = (x.repeat_interleave(repeats, 0) for x in seen)
            scores = (k_seen @ _rope(q[i : i + 1], table[i : i + 1])[0, :, :, None])[..., 0] * head_size**-0.5
            out[begin + i] = (scores.softmax(-1)[:, None] @ v_seen).flatten()
    return out


def visible_rows(mask: Tensor, row: int, rows: int) -> list[int]:
    """Which of its sequence's rows a row sees: int32 mask words, all zero for a causal row."""
    words = [int(word) & 0xFFFFFFFF for word in mask]
    if not any(words):
        return list(range(row + 1))
    return [j for j in range(rows) if j == row or (j < 32 * len(words) and words[j // 32] >> (j % 32) & 1)]


def rope_table(positions: int, head_size: int) -> Tensor:
    """Float [positions, head_size]: cosines, then sines, of the unscaled RoPE."""
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def _rope(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
