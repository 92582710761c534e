"""Sampling of a step's tokens on the device that has its logits: the same function of logits, random number and
settings as `Sampler.choose` on the host, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redraft.batch import TargetBatch
from redraft.decoding.sampling import Sampler, position_uniforms
from redraft.engines.api import LogitRows, Samplers
from redraft.engines.cuda.transfer import Results, upload

AT_ONCE = 1 << 24
"""Logits that are drawn from at a time."""
DRAW_BYTES = 40
"""Bytes of memory for each of these logits at most: weights, their order and running sums."""
LOGITS, LIKELIEST, DRAWN, FILTERED = range(4)
"""Kinds of logit rows by what they give: the logits, the most likely token, a token drawn from all, or one drawn by
top-k or top-p."""


class SampledRows:
    """Tokens int32 [R], and logits float32 [F, V] of some rows: `places` int [R] is a row's place there, -1 for none.
    See `LogitRows`."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, places: np.ndarray):
        self._tokens, self._logits, self._places = tokens, logits, places

    def __getitem__(self, rows: slice) -> np.ndarray:
        place = self._places[rows.start]
        return self._tokens[rows] if place < 0 else self._logits[place : place + rows.stop - rows.start]


def sample(logits: Tensor, batch: TargetBatch, samplers: Samplers, results: Results) -> LogitRows:
    """Sample from logits [R, V] on the device for `Engine.execute`. Waits for the device once."""
    if samplers is None:
        return results.fetch([logits.float()])[0]
    kinds, draws = _plan(batch, samplers, logits.shape[1])
    wanted, places = np.flatnonzero(kinds == LOGITS), np.full(len(kinds), -1)
    places[wanted] = np.arange(len(wanted))
    rows = logits.index_select(0, upload(wanted, logits.device)).float()
    tokens, fetched = results.fetch([sample_tokens(logits, draws), rows])
    return SampledRows(tokens, fetched, places)


def sample_tokens(logits: Tensor, draws: Sequence[np.ndarray]) -> Tensor:
    """Tokens int32 [R] for logits [R, V]: the most likely one, or a draw in the rows of `draws`. Each of its two tables
    is float64 [5, D]: rows, random numbers, inverse temperatures, top-k and top-p. Only the second table is filtered by
    top-k and top-p."""
    tokens, most = logits.argmax(1), max(AT_ONCE // logits.shape[1], 1)
    for filtered, asked in enumerate(draws):
        if asked.shape[1]:
            for part in upload(asked, logits.device).split(most, dim=1):
                rows = part[0].long()
                tokens[rows] = _drawn(logits[rows].float(), part[1:, :, None], bool(filtered))
    return tokens.int()


def _plan(
    batch: TargetBatch, samplers: Sequence[Sampler | None], vocab_size: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The kind of each logit row, and the tables of draws for `sample_tokens`."""
    owners = np.searchsorted(batch.row_offsets, batch.logit_rows, side="right") - 1
    kinds = np.array([_kind(sampler) for sampler in samplers])[owners]
    drawn = [np.flatnonzero(kinds == kind) for kind in (DRAWN, FILTERED)]
    if not any(map(len, drawn)):
        return kinds, [np.zeros((5, 0))]
    positions = batch.positions[batch.logit_rows].astype(np.int64)
    positions -= positions[np.searchsorted(owners, owners)]
    positions += np.array([sampler.position if sampler else 0 for sampler in samplers])[owners]
    seeds = np.array([sampler.seed if sampler else 0 for sampler in samplers], np.uint64)[owners]
    settings = np.array(
        [
            (sampler.inverse_temperature, sampler.top_k or vocab_size, sampler.top_p) if sampler else (1, 0, 1)
            for sampler in samplers
        ]
    )[owners]
    uniforms = position_uniforms(seeds, positions.astype(np.uint64))
    table = np.stack([np.arange(len(owners)), uniforms, *settings.T])
    return kinds, [np.ascontiguousarray(table[:, rows]) for rows in drawn]


def _kind(sampler: Sampler | None) -> int:
    if sampler is None:
        return LOGITS
    if sampler.greedy:
        return LIKELIEST
    return FILTERED if sampler.top_k or sampler.top_p < 1 else DRAWN


def _drawn(logits: Tensor, settings: Tensor, filtered: bool) -> Tensor:
    """Tokens int64 [D] drawn from logits float32 [D, V] by settings float64 [4, D, 1]."""
    uniforms, inverse_temperatures, top_k, top_p = settings
    weights = ((logits - logits.amax(1, keepdim=True)) * inverse_temperatures.float()).exp()
    if filtered:
        weights = _filtered(weights, top_k, top_p)
    mass = weights.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(mass, uniforms * mass[:, -1:], right=True)[:, 0]


def _filtered(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights float32 [D, V], set to 0 outside the top_k largest and the fewest of these that hold top_p of their sum,
    each float64 [D, 1]. Among equals the lowest ids are kept."""
    ordered, ids = weights.sort(dim=1, descending=True, stable=True)
    ordered = ordered.where(torch.arange(ordered.shape[1], device=ordered.device) < top_k, 0)
    mass = ordered.cumsum(1, dtype=torch.float64)
    ordered = ordered.where(mass - ordered < top_p * mass[:, -1:], 0)
    return torch.zeros_like(weights).scatter_(1, ids, ordered)
