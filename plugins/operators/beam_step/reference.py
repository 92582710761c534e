"""The reference of `BeamStep` in torch: part of the drafter's module, and so of networks in native form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def beam_step(values: Tensor, ids: Tensor, width: int, *draft: Tensor) -> tuple[Tensor, ...]:
    """values float [B * n, K], ids int32 [B * n, K] and, after the first level, the first four of the step before's
    results, to candidates, log_probs, parents, chosen, tokens and origins: see README.md. Equals: in any order."""
    nodes, k = width if draft else 1, values.shape[-1]
    sums, ids = values.view(-1, nodes, k), ids.view(-1, nodes, k)
    batch = sums.shape[0]
    expanded = torch.zeros(batch, width, dtype=torch.int32, device=ids.device)
    if draft:
        *_, expanded = draft
        sums = draft[1][:, -1].flatten(1).gather(1, expanded.long())[..., None] + sums
    absent = (0, 0, 0, width - nodes)
    level = F.pad(ids, absent), F.pad(sums, absent, value=float("-inf")), expanded
    appended = [new[:, None] for new in level]
    if draft:
        appended = [torch.cat(parts, dim=1) for parts in zip(draft[:3], appended, strict=True)]
    chosen = sums.flatten(1).topk(width, dim=-1).indices
    tokens = ids.flatten(1).gather(1, chosen)
    sequence = torch.arange(batch, device=ids.device)[:, None]
    origins = torch.div(chosen, k, rounding_mode="trunc") + nodes * sequence
    return *appended, chosen.to(torch.int32), tokens.flatten(), origins.flatten().to(torch.int32)
