"""`TopLogProbs` in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def top_log_probs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See README.md."""
    scores = logits.float()
    columns = torch.arange(scores.shape[1], device=scores.device)
    best = ((_ordered(scores).long() << 32) - columns).topk(k, dim=-1).indices
    return F.log_softmax(scores, dim=-1).gather(-1, best), ids[best]


def _ordered(x: Tensor) -> Tensor:
    """int32 of float32 x, larger where x is larger; zeros of both signs are equal."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
