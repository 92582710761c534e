"""The reference of `TokenInfoTopK` in torch: part of the drafter's module, and so of exported programs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_info_topk(
    logits: Tensor,
    sequences: Tensor,
    tokens: Tensor,
    ids: Tensor,
    *info: Tensor,
    k: int,
    level: int,
    levels: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities float [N, k] and target ids int32 [N, k]: see README.md. `info`: nothing, its rows, or row_of,
    table and scales. Equal values come in any order."""
    scores = F.embedding(sequences, logits.unflatten(0, (-1, levels))[:, level])
    if info:
        *table, added = info
        if table:
            (row_of, rows), scales = table, added
            entries = row_of[tokens.long()].long()
            added = rows[entries].to(scores.dtype) * scales[entries]
        scores = scores + F.pad(added, (0, scores.shape[1] - added.shape[1]))
    values, columns = torch.log_softmax(scores.float(), dim=-1).topk(k, dim=-1)
    return values, ids[columns]
