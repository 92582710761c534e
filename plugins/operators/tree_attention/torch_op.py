"""`TreeAttention` as a torch operator, `torch.ops.redraft.tree_attention`, for exported programs on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.tree_attention import cuda

BITS = 32
DEFAULTS = (None, 0, None, None, 1e-5)
"""Default values of the arguments from `starts` on."""


@torch.library.custom_op("redraft::tree_attention", mutates_args=("k_cache", "v_cache"))
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
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    starts: Tensor | None = None,
    window: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """See README.md; returns [T, num_heads * head_size] in the dtype of `qkv`. On a GPU by the CUDA kernels, else here,
    sequence by sequence: first all caches are updated."""
    out = torch.zeros(len(qkv), num_heads * head_size, dtype=qkv.dtype, device=qkv.device)
    q, k, v = qkv.unflatten(-1, (-1, head_size)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = (
            F.rms_norm(x.to(norm.dtype), (head_size,), norm, norm_eps).to(x.dtype)
            for x, norm in ((q, q_norm), (k, k_norm))
        )
    table = rope_table[positions][:, None]
    q, k = _rope(q, table), _rope(k, table)
    first_rows = cache_lengths if starts is None else starts
    offsets, slot_ids, lengths, firsts = (x.tolist() for x in (row_offsets, slots, cache_lengths, first_rows))
    commits = commit_offsets.tolist() or [0] * len(offsets)
    sequences = list(enumerate(zip(slot_ids, lengths, firsts, strict=True)))
    for b, (slot, length, first) in sequences:
        rows, end = slice(offsets[b], offsets[b + 1]), first + offsets[b + 1] - offsets[b]
        committed = commit_src[commits[b] : commits[b + 1]]
        base = length - len(committed)
        for cache, new in ((k_cache[slot], k), (v_cache[slot], v)):
            cache[:, _rows(base, length, cache)] = cache[:, (base + committed) % cache.shape[1]]
            cache[:, _rows(first, end, cache)] = new[rows].transpose(0, 1).to(cache.dtype)
    for b, (slot, length, first) in sequences:
        rows, count = slice(offsets[b], offsets[b + 1]), offsets[b + 1] - offsets[b]
        end = first + count
        if not count:
            continue
        kept = max(0, end - k_cache.shape[2])
        seen = torch.ones(count, end, dtype=torch.bool, device=qkv.device)
        seen[:, length:] = visible_rows(tree_mask[rows], count, end - length)
        if window:
            seen &= seen.sum(1, keepdim=True) - seen.cumsum(1) < window
        keys, values = (cache[slot][:, _rows(kept, end, cache[slot])].to(q.dtype) for cache in (k_cache, v_cache))
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen[:, kept:], enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1).flatten(1)
    return out


@tree_attention.register_fake
def _(qkv: Tensor, *arguments: Any) -> Tensor:
    num_heads, _, head_size = arguments[10:13]
    return qkv.new_empty(qkv.shape[0], num_heads * head_size)


def by_kernels(qkv: Tensor, *arguments: Any, run: Callable[..., list[Tensor]] = run) -> Tensor:
    """Compute `tree_attention` by the CUDA kernels, in the caches' dtype. Nothing waits for the GPU and
    sizes follow from shapes, so that a CUDA graph can hold it. Raises the errors of `cuda.tree_attention`."""
    rows, caches, (num_heads, num_kv_heads, head_size) = arguments[:8], arguments[8:10], arguments[10:13]
    options: tuple[Any, ...] = (*arguments[13:], *DEFAULTS[len(arguments) - 13 :])
    starts, window, q_norm, k_norm, norm_eps = options
    dtype = caches[0].dtype
    out = cuda.tree_attention(
        *(tensor.contiguous() for tensor in (qkv.to(dtype), *rows)),
        *caches,
        *([] if starts is None else [starts.contiguous()]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        window=window,
        norms=None if q_norm is None else (q_norm.float().contiguous(), k_norm.float().contiguous()),
        norm_eps=norm_eps,
        run=run,
    )
    return out.to(qkv.dtype)


tree_attention.register_kernel("cuda")(by_kernels)


def _rows(first: int, end: int, cache: Tensor) -> slice | Tensor:
    """Where a cache [kv_heads, rows, head_size] has the places from `first` to before `end`."""
    if end <= cache.shape[1]:
        return slice(first, end)
    return torch.arange(first, end, device=cache.device) % cache.shape[1]


def visible_rows(tree_mask: Tensor, count: int, behind: int) -> Tensor:
    """bool [count, behind]: which of the `behind` rows after the context each of the last `count` of them sees, from
    their mask words int32 [count, words]; a row without any bit is causal, and all are without words."""
    words = tree_mask.shape[1]
    own = torch.arange(behind - count, behind, device=tree_mask.device)[:, None]
    row = torch.arange(behind, device=tree_mask.device)
    if not words:
        return row <= own
    bits = (tree_mask[:, :, None] >> torch.arange(BITS, device=tree_mask.device)) & 1
    marked = F.pad(bits.flatten(1).bool(), (0, max(0, behind - words * BITS)))[:, :behind]
    causal = (tree_mask == 0).all(1, keepdim=True)
    return torch.where(causal, row <= own, marked | (row == own))


def _rope(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.to(x.dtype).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
