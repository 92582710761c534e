"""`PerturbedTopK` as a torch operator, `torch.ops.redraft.perturbed_topk`, for exported programs on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redraft.plugins.operators.perturbed_topk import cuda, reference


@torch.library.custom_op("redraft::perturbed_topk", mutates_args=())
def perturbed_topk(
    values: Tensor,
    ids: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    sharpness: Tensor,
    level: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """See README.md; one node of a program, where the reference would be hundreds. On a GPU by the CUDA kernel."""
    noise = (seeds, positions, temperature, top_k, top_p, sharpness)
    return reference.perturbed_topk(values, ids, *noise, level=level, k=k)


@perturbed_topk.register_fake
def _(values: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    shape = values.shape[0], arguments[-1]
    return values.new_empty(shape, dtype=torch.float32), ids.new_empty(shape)


@perturbed_topk.register_kernel("cuda")
def _(values: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *noise, level, k = arguments
    return cuda.perturbed_topk(values, ids, *noise, level=level, k=k)
