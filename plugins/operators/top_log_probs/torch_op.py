"""`TopLogProbs` as a torch operator, `torch.ops.redraft.top_log_probs`, for exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.top_log_probs import cuda, reference


@torch.library.custom_op("redraft::top_log_probs", mutates_args=())
def top_log_probs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See README.md. On a GPU by the CUDA kernel."""
    return reference.top_log_probs(logits, ids, k)


@top_log_probs.register_fake
def _(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], k
    return logits.new_empty(shape, dtype=torch.float32), ids.new_empty(shape)


@top_log_probs.register_kernel("cuda")
def _(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return cuda.top_log_probs(logits, ids, k)
