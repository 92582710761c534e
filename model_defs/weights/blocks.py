"""A target's weights in the blocks of their source, renamed, put in order and joined as floats are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from redraft.model_defs.target.families.base import Weight, Weights
from redraft.plugins.operators.linear.blocks import HALF_PANEL, BlockWeight


@runtime_checkable
class BlockSource(Protocol):
    """Weights of a checkpoint, some of which are stored in blocks."""

    def form(self, name: str) -> str | None:
        """The form of one by its Hugging Face name; None for floats, and for blocks that no operator reads."""
        ...

    def quantization(self, name: str) -> str | None:
        """What the source calls the way in which one is quantized; None for floats."""
        ...

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        ...

    def in_blocks(self, name: str, rows: np.ndarray) -> BlockWeight:
        """These rows of one that has a form. Raises ValueError for damaged blocks."""
        ...


class StoredBlocks:
    """Those of a target's weights that are stored in blocks, by our names. Each is read when it is asked for."""

    def __init__(self, weights: Weights, source: BlockSource, tied: bool):
        """`tied`: whether the embedding is the LM head too."""
        shapes = source.shapes()
        self._source = source
        self._parts: dict[str, list[tuple[str, np.ndarray]]] = {}
        self.widened: dict[str, str] = {}
        """How quantized weights that no operator takes as they are are quantized, by Hugging Face name"""
        for name, weight in weights.items():
            forms = [source.form(part) for part in weight.sources]
            orders = row_orders(weight, [len(shapes[part]) for part in weight.sources]) if all(forms) else None
            if orders and _fits(forms, [len(rows) for rows in orders]):
                self._parts[name] = list(zip(weight.sources, orders, strict=True))
                continue
            kinds = {part: source.quantization(part) for part in weight.sources}
            self.widened |= {part: kind for part, kind in kinds.items() if kind}
        if tied and "embedding.weight" in self._parts:
            self._parts["lm_head.weight"] = self._parts["embedding.weight"]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def segments(self, name: str) -> list[BlockWeight]:
        """A weight's rows, one below the other; neighbours of one form are one. Raises ValueError for damaged
        blocks."""
        weights = [self._source.in_blocks(part, rows) for part, rows in self._parts[name]]
        return [_joined(list(group)) for _, group in groupby(weights, lambda weight: weight.form)]

    def first_rows(self, name: str, count: int) -> Tensor:
        """A weight's first rows float32 [count or fewer, K]."""
        parts: list[np.ndarray] = []
        for part, rows in self._parts[name]:
            if missing := count - sum(map(len, parts)):
                parts.append(self._source.in_blocks(part, rows[:missing]).dequantized())
        return torch.from_numpy(np.concatenate(parts))


def row_orders(weight: Weight, counts: Sequence[int]) -> list[np.ndarray] | None:
    """For each source of a weight, with so many rows each, the rows that ours has of it, in our order; None where our
    weight is more than the sources' rows one below the other."""
    bounds = [0, *accumulate(counts)]
    numbers = torch.arange(bounds[-1])[:, None]
    changed = weight.read([numbers[begin:end] for begin, end in pairwise(bounds)])
    if changed.dtype != numbers.dtype or changed.ndim != 2:
        return None
    rows = changed[:, 0].numpy()
    source = np.searchsorted(bounds, rows, side="right") - 1
    if (np.diff(source) < 0).any():
        return None
    return [rows[source == i] - bounds[i] for i in range(len(counts))]


def _fits(forms: Sequence[str | None], counts: Sequence[int]) -> bool:
    """Whether the operators take segments of these forms and rows: another form begins with a half-panel, or with the
    second half of a gated projection."""
    ends = accumulate(counts)
    changes = [end for end, (form, other) in zip(ends, pairwise(forms), strict=False) if form != other]
    return all(end % HALF_PANEL == 0 for end in changes) or changes == [sum(counts) // 2]


def _joined(weights: list[BlockWeight]) -> BlockWeight:
    """Weights of one form, one below the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    parts = {name: np.concatenate([weight.parts[name] for weight in weights]) for name in first.parts}
    return BlockWeight(first.form, np.concatenate([weight.codes for weight in weights]), parts)
