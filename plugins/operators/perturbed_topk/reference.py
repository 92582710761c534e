"""The reference of `PerturbedTopK` in torch: part of the drafter's module, and so of exported programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.plugins.operators.draw_step.reference import filtered

WORD, TOKEN_NOISE = 0xFFFFFFFF, 0x80000000
"""A word's bits, and the last counter word of the token noise."""


def perturbed_topk(
    values: Tensor,
    ids: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    sharpness: Tensor,
    *,
    level: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """values float and ids int32 [N, m], then seeds int32 [B, 2] and the others [B], to scores float32 [N, k],
    descending, and ids int32 [N, k]: see README.md. Equal scores come in any order."""
    batch, most = seeds.shape[0], values.shape[-1]
    values, ids = values.float().view(batch, -1, most), ids.view(batch, -1, most)
    log_p = filtered(values, temperature, top_k, top_p)
    perturbed = log_p - race(seeds, positions + level, ids).log()
    scores = torch.log_softmax(sharpness[:, None, None] * perturbed, dim=-1)
    # A place's own order where nothing is drawn.
    greedy = (temperature <= 0)[:, None, None]
    best, indices = torch.where(greedy, values, scores).topk(k, dim=-1)
    return best.flatten(0, 1), ids.gather(-1, indices).flatten(0, 1)


def race(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Exponential noise float32 [B, n, m] of the tokens ids int32 [B, n, m] at the positions int32 [B], for seeds int32
    [B, 2]: that of plugins/noise.h, up to rounding."""
    key, tokens = [word[:, None, None] & WORD for word in seeds.long().unbind(-1)], ids.long()
    counter = [positions.long()[:, None, None], tokens >> 2, tokens & 0, (tokens & 0) + TOKEN_NOISE]
    words = torch.stack(philox(key, counter), dim=-1)
    word = words.gather(-1, (tokens & 3)[..., None]).squeeze(-1)
    return -torch.log1p(-(word.double() + 0.5) * 2.0**-32).float()


def philox(key: Sequence[Tensor], counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10, of 32-bit words in int64, whose products wrap around to the same bits."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (high >> 32 & WORD) ^ c1 ^ k0, high & WORD
        c2, c3 = (low >> 32 & WORD) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
