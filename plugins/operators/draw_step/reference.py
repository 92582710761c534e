"""The reference of `DrawStep` in torch: part of the drafter's module, and so of networks in native form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_step(
    values: Tensor,
    ids: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    rule: str,
    count: int,
    *draft: Tensor,
) -> tuple[Tensor, ...]:
    """values float and ids int32 [B * n, M], noise float [B, R, M], the filters [B] and, after the first level, the
    step before's results but its last three, to ids, log_probs, draws, with `stochastic_beam` totals and gumbels,
    tokens, origins and sequences: see README.md. Equal values come in any order."""
    expanded, drawn = (draft[0].shape[1], draft[2].shape[1]) if draft else (0, 0)
    nodes, support = drawn + 1 - expanded, values.shape[-1]
    greedy = (temperature <= 0)[:, None, None]
    values, ids = values.view(-1, nodes, support), ids.view(-1, nodes, support)
    if draft:
        there = draft[2][:, -nodes:, None] >= 0
        values, ids = torch.where(there, values, float("-inf")), torch.where(there, ids, 0)
    log_probs = filtered(values, temperature, top_k, top_p)

    row, rows = (drawn, count) if rule == "independent" else (expanded, nodes)
    noise = torch.where(greedy, 0.0, noise[:, row : row + rows])
    first_of_node = support * torch.arange(nodes, device=ids.device)
    totals = log_probs
    if rule == "gumbel_top_k":
        scores, indices = _best(log_probs + noise, count)
        indices = indices + first_of_node[:, None]
    elif rule == "stochastic_beam":
        if draft:
            totals = draft[3][..., None] + log_probs
        bounds = draft[4] if draft else torch.zeros_like(values[..., 0])
        scores, indices = _best(torch.where(greedy, totals, _truncated(totals + noise, bounds)).flatten(1), count)
    else:
        scores, indices = _best(log_probs + noise, 1)
        indices = indices + (first_of_node[:, None] if nodes > 1 else 0)
        if nodes == 1:
            most_likely = _best(log_probs.flatten(1), count)
            scores = torch.where(greedy[..., 0], most_likely[0], scores.flatten(1))
            indices = torch.where(greedy[..., 0], most_likely[1], indices.flatten(1))
    scores, indices = scores.flatten(1), indices.flatten(1)

    is_drawn = torch.isfinite(scores)
    draws = torch.where(is_drawn, indices + expanded * support, -1).to(torch.int32)
    tokens = torch.where(is_drawn, ids.flatten(1).gather(1, indices), 0)
    sequence = torch.arange(indices.shape[0], device=ids.device)[:, None].expand_as(indices)
    origins = nodes * sequence + torch.where(is_drawn, torch.div(indices, support, rounding_mode="trunc"), 0)
    appended: tuple[Tensor, ...] = ids, log_probs, draws
    if draft:
        appended = tuple(torch.cat(parts, dim=1) for parts in zip(draft[:3], appended, strict=True))
    state: tuple[Tensor, ...] = ()
    if rule == "stochastic_beam":
        paths = totals.flatten(1).gather(1, indices)
        state = tuple(torch.where(is_drawn, x, float("-inf")) for x in (paths, scores))
    return *appended, *state, tokens.flatten(), *(x.flatten().to(torch.int32) for x in (origins, sequence))


def filtered(values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """p as log-probabilities; values [B, n, M] descend, and are -inf at nodes that are not there."""
    temperature, top_k, top_p = (x[:, None, None] for x in (temperature, top_k, top_p))
    there = torch.isfinite(values)
    best = torch.where(there[..., :1], values[..., :1], 0.0)
    scaled = (values - best) / torch.where(temperature > 0, temperature, 1.0)
    index = torch.arange(values.shape[-1], device=values.device)
    kept = there & ((index < top_k) | (top_k <= 0))
    weights = torch.where(kept, scaled.exp(), 0.0)
    before = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    kept = kept & ((before < top_p) | (top_p >= 1))
    total = torch.where(kept, weights, 0.0).sum(-1, keepdim=True)
    return torch.where(kept, scaled - total.log(), float("-inf"))


def _truncated(perturbed: Tensor, bounds: Tensor) -> Tensor:
    """Perturbed values [B, n, M] given that the best of each node is `bounds` [B, n]."""
    bounds = bounds[..., None]
    there = torch.isfinite(perturbed)
    gap = torch.where(there, perturbed - perturbed.amax(-1, keepdim=True), 0.0)
    excess = bounds - perturbed + torch.log1p(-gap.exp())
    truncated = bounds - excess.clamp(min=0) - torch.log1p((-excess.abs()).exp())
    return torch.where(there, truncated, float("-inf"))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest along the last axis and their places; -inf where there are fewer."""
    taken = min(count, scores.shape[-1])
    values, indices = scores.topk(taken, dim=-1)
    missing = (0, count - taken)
    return F.pad(values, missing, value=float("-inf")), F.pad(indices, missing)
