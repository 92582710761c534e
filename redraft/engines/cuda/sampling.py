"""Sampling of a step's tokens on the device that has its logits: the same function of logits, noise and settings as
`Sampler.choose` on the host, up to rounding."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redraft.batch import TargetBatch
from redraft.decoding.sampling import Sampler
from redraft.engines.api import LogitRows, Meanwhile, Samplers
from redraft.engines.cuda.masks import forbid, guide_masks
from redraft.engines.cuda.transfer import Results, upload
from redraft.plugins.operators.sampling.cuda import race

AT_ONCE = 1 << 26
"""Logits that are masked or drawn from at a time."""
DRAW_BYTES = 6
"""Bytes of memory for each of these logits at most: gathered in bf16, and converted to float32."""
LOGITS, LIKELIEST, DRAWN, FILTERED = range(4)
"""Kinds of logit rows by what they give: the logits, the most likely token, a token drawn from all, or one drawn by
min-p, top-k or top-p."""


class SampledRows:
    """Tokens int32 [R], and logits float32 [F, V] of some rows: `indices` int [R] is a row's index there, -1 for none.
    See `LogitRows`."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, indices: np.ndarray):
        self._tokens, self._logits, self._indices = tokens, logits, indices

    def __getitem__(self, rows: slice) -> np.ndarray:
        index = self._indices[rows.start]
        return self._tokens[rows] if index < 0 else self._logits[index : index + rows.stop - rows.start]


def draws_on(device: torch.device) -> bool:
    """Whether tokens are drawn on the device: a GPU that a first draw succeeds on, with the kernels compiled and
    loaded by the driver. Otherwise say on stderr that the host draws, as on the CPU."""
    if device.type != "cuda":
        return False
    try:
        logits, scales = torch.zeros(1, 1, device=device), torch.ones(1, device=device)
        words = torch.zeros(1, 3, dtype=torch.int32, device=device)
        race(logits, scales, words, words).cpu()
    except RuntimeError as error:
        print(f"at temperatures above 0 tokens are drawn on the host, which is slower: {error}", file=sys.stderr)
        return False
    return True


def sample(
    logits: Tensor,
    batch: TargetBatch,
    samplers: Samplers,
    results: Results,
    draws: bool,
    meanwhile: Meanwhile | None = None,
) -> LogitRows:
    """Sample from logits [R, V] on the device for `Engine.execute`, and mask those of guided sequences in place.
    Waits for the device once. Without `draws` sequences that draw or are guided have their logits."""
    if samplers is None:
        return results.fetch([logits.float()], meanwhile)[0]
    owners = np.searchsorted(batch.row_offsets, batch.logit_rows, side="right") - 1
    masks = guide_masks(batch, samplers) if draws else {}
    if masks:
        forbid(logits, np.flatnonzero(np.isin(owners, [*masks])), np.concatenate([*masks.values()]), _at_once(logits))
    chosen = [
        each if each and (each.grammar is None or index in masks) else None for index, each in enumerate(samplers)
    ]
    kinds, tables = _plan(batch, owners, chosen, draws)
    wanted, indices = np.flatnonzero(kinds == LOGITS), np.full(len(kinds), -1)
    indices[wanted] = np.arange(len(wanted))
    rows = logits.index_select(0, upload(wanted, logits.device)).float()
    tokens, fetched = results.fetch([sample_tokens(logits, tables), rows], meanwhile)
    return SampledRows(tokens, fetched, indices) if len(wanted) else tokens


def sample_tokens(logits: Tensor, tables: Sequence[np.ndarray]) -> Tensor:
    """Tokens int32 [R] for logits [R, V]: the most likely one, or a draw in the rows of `tables`. Each of the two is
    int32 [9, D]: rows, their keys (see `race`) in three rows, top-k, the bits of inverse temperatures and of margins of
    min-p (see `Sampler`) as float32, and those of top-p as float64 in two rows. Only the second table's are filtered by
    min-p, top-k and top-p."""
    tokens, most = logits.argmax(1).int(), _at_once(logits)
    for filtered, asked in enumerate(tables):
        if asked.shape[1]:
            min_p = np.isfinite(asked[6].view(np.float32)).any()
            for part in upload(asked, logits.device).split(most, dim=1):
                rows, low, high, positions, top_k, scales, margins, *top_p = part
                rows, keys = rows.long(), torch.stack((low, high, positions), dim=1)
                filters = torch.stack((top_k, *top_p), dim=1) if filtered else None
                floats = logits[rows].float()
                if min_p:
                    floors = floats.amax(1) + margins.view(torch.float32)
                    floats.masked_fill_(floats < floors[:, None], -math.inf)
                tokens[rows] = race(floats, scales.view(torch.float32), keys, filters)
    return tokens


def _at_once(logits: Tensor) -> int:
    """Rows of logits [R, V] that are masked or drawn from at a time."""
    return max(AT_ONCE // logits.shape[1], 1)


def _plan(
    batch: TargetBatch, owners: np.ndarray, samplers: Sequence[Sampler | None], draws: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The kind of each logit row, and the tables of draws for `sample_tokens`: rows of one sequence and depth, which
    share their noise, stand together. `owners` int [R] are the rows' sequences."""
    kinds = np.array([_kind(sampler, draws) for sampler in samplers])[owners]
    drawn = [np.flatnonzero(kinds == kind) for kind in (DRAWN, FILTERED)]
    if not any(map(len, drawn)):
        return kinds, []
    positions = batch.positions[batch.logit_rows].astype(np.int64)
    positions -= positions[np.searchsorted(owners, owners)]
    positions += np.array([sampler.position if sampler else 0 for sampler in samplers])[owners]
    seeds = np.array([sampler.seed if sampler else 0 for sampler in samplers], np.uint64).view(np.uint32)
    scales = np.array([sampler.inverse_temperature if sampler else 1 for sampler in samplers], np.float32)
    margins = np.array([sampler.margin if sampler else 0 for sampler in samplers], np.float32)
    top_p = np.array([sampler.top_p if sampler else 1 for sampler in samplers], np.float64)
    top_k = np.array([sampler.top_k if sampler else 0 for sampler in samplers])
    keys = (*seeds.reshape(-1, 2)[owners].T, positions)
    table = np.stack(
        [
            np.arange(len(owners)),
            *keys,
            top_k[owners],
            scales.view(np.int32)[owners],
            margins.view(np.int32)[owners],
            *top_p.view(np.int32).reshape(-1, 2)[owners].T,
        ],
        dtype=np.int32,
        casting="unsafe",
    )
    order = np.lexsort((positions, owners))
    return kinds, [np.ascontiguousarray(table[:, order[np.isin(order, rows)]]) for rows in drawn]


def _kind(sampler: Sampler | None, draws: bool) -> int:
    if sampler is None or not (sampler.greedy or draws):
        return LOGITS
    if sampler.greedy:
        return LIKELIEST
    filtered = sampler.top_k or sampler.top_p < 1 or sampler.margin > -math.inf
    return FILTERED if filtered else DRAWN
