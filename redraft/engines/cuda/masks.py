"""Masks of guided sequences' logit rows: made on the host, as each depends only on its row's path, and applied where
the logits are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redraft.batch import TargetBatch
from redraft.decoding.sampling import Sampler
from redraft.engines.cuda.transfer import upload
from redraft.grammar.state import GrammarState

EVERY_TOKEN = 0xFF
"""Each byte of a mask that allows all tokens."""


def guide_masks(batch: TargetBatch, samplers: Sequence[Sampler | None]) -> dict[int, np.ndarray]:
    """By sequence, ascending: the `row_masks` of those that have logit rows and a sampler with a grammar. A row after a
    draft that is forbidden or ends the text has no token, and allows all instead: no walk takes its token. Left out are
    those whose grammar has grown past its limits, or allows nothing without a draft: only the host knows how they go
    on."""
    masks = {}
    for index, sampler in enumerate(samplers):
        if sampler and (grammar := sampler.grammar):
            bits = row_masks(batch, index, grammar)
            if bits[:1].any() and not grammar.past_limits:
                bits[~bits.any(axis=1)] = EVERY_TOKEN
                masks[index] = bits
    return masks


def row_masks(batch: TargetBatch, sequence: int, grammar: GrammarState) -> np.ndarray:
    """Bits uint8 [rows, ceil(V / 8)], the lowest first, of the tokens that a grammar allows after each logit row of a
    sequence: its state stands at the first of them. The state keeps the masks for the walk."""
    start, end = batch.row_offsets[sequence : sequence + 2].tolist()
    rows = batch.logit_rows[(start <= batch.logit_rows) & (batch.logit_rows < end)]
    visible = np.unpackbits(batch.tree_mask[rows].view(np.uint8), axis=1, bitorder="little")
    tokens = batch.input_ids[start:end]
    paths = [tuple(tokens[np.flatnonzero(above)[1:]].tolist()) for above in visible]
    bits = [np.packbits(grammar.mask(path), bitorder="little") for path in paths]
    return np.stack(bits) if bits else np.empty((0, 0), np.uint8)


def forbid(logits: Tensor, rows: np.ndarray, masks: np.ndarray, at_once: int) -> None:
    """Make logits [R, V] of tokens that masks do not allow -inf, in place, in so many rows at a time: masks are bits
    uint8 [G, ceil(V / 8)] of rows int [G]."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    every = (upload(array, logits.device).split(at_once) for array in (rows, masks))
    for where, allowed in zip(*every, strict=True):
        forbidden = (allowed[:, :, None] & bits).flatten(1)[:, : logits.shape[1]] == 0
        logits.index_copy_(0, where, logits[where].masked_fill_(forbidden, -math.inf))
