"""`TreeAttention` by the kernels of kernel.cu and kernel_fp32.cu, in bf16 and fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_KERNELS, HEAD_SIZES, KERNELS, eps_bits


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
    run: Callable[..., list[Tensor]] = run,
) -> Tensor:
    """Compute `TreeAttention` on a GPU or, for tests, on the CPU; qkv, caches and the result are bf16 or f32, the
    `norms` of query and key heads f32.

    Raises ValueError for a head size that is not in HEAD_SIZES and for tensors that do not fit; what they hold is not
    looked at, since that would wait for the GPU.
    """
    if head_size not in HEAD_SIZES or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} heads, {num_kv_heads} KV heads of size {head_size}: expected a multiple, of size "
            f"{', '.join(map(str, HEAD_SIZES))}"
        )
    attributes = {"heads": num_heads, "kv_heads": num_kv_heads, "head_size": head_size}
    offsets = (row_offsets, slots, cache_lengths, cache_lengths if starts is None else starts)
    write, split, combine = FP32_KERNELS if k_cache.dtype == torch.float32 else KERNELS
    if not tree_mask.numel():
        tree_mask = tree_mask.new_empty(len(qkv), 0)
    read = norms or (qkv.new_empty(head_size, dtype=torch.float32),) * 2  # without norms the kernel reads neither
    q, k, v = run(
        write,
        (qkv, positions, *offsets, commit_src, commit_offsets, rope_table, *read, k_cache, v_cache),
        attributes | {"norm_eps": eps_bits(norm_eps) if norms else 0},
    )
    parts = run(split, (q, *offsets, tree_mask, k, v), attributes | {"window": window})
    others = {"positions": positions, "row_offsets": row_offsets, "k_cache": k}
    taken = (others[argument.name] for argument in combine.inputs[len(parts) :])
    return run(combine, (*parts, *taken), attributes)[0]
