"""A target's weights in the blocks of their source, renamed, put in order and joined as floats are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from redraft.model_defs.target.families.base import Weight, Weights
from redraft.plugins.operators.linear.blocks import (
    GROUP,
    HALF_PANEL,
    BlockWeight,
    Form,
    block_form,
    same_order,
)
from redraft.plugins.operators.linear.pack import block_bytes


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

    def feature_order(self, name: str) -> np.ndarray | None:
        """The `feature_order` of one that has a form."""
        ...

    def in_blocks(self, name: str, rows: np.ndarray) -> BlockWeight:
        """These rows of one that has a form. Raises ValueError for damaged blocks."""
        ...


@dataclass(frozen=True)
class StoredRows:
    """Rows of one form, one source's below another's: see `BlockRows`."""

    form: Form
    shape: tuple[int, int]
    source: BlockSource
    parts: tuple[tuple[str, np.ndarray], ...]
    """Hugging Face names, and for each the rows that ours has of it, in our order"""
    feature_order: np.ndarray | None
    """The `feature_order` of its `BlockWeight`s"""
    features: range
    """Which of the source's features it has: all, or neighbours in order"""

    def rows(self, index: slice) -> BlockWeight:
        """Some rows, of which the source is read. Raises ValueError for damaged blocks."""
        begin, end, _ = index.indices(self.shape[0])
        bounds = accumulate((len(rows) for _, rows in self.parts), initial=0)
        chosen = [
            (name, rows[max(begin - first, 0) : max(end - first, 0)])
            for (name, rows), first in zip(self.parts, bounds, strict=False)
        ]
        read = _joined([self.source.in_blocks(name, rows) for name, rows in chosen if len(rows)])
        return read.features(self.features)

    @property
    def feature_step(self) -> int:
        """A part with some of the features begins at a multiple of this: a row in one span may be cut between groups of
        activations."""
        return GROUP if self.shape[1] <= self.form.span else self.form.span

    def with_rows(self, index: np.ndarray) -> StoredRows:
        """Only these of its rows, which ascend."""
        parts, first = [], 0
        for name, rows in self.parts:
            chosen = rows[index[(index >= first) & (index < first + len(rows))] - first]
            parts += [(name, chosen)] * (len(chosen) > 0)
            first += len(rows)
        return replace(self, parts=tuple(parts), shape=(len(index), self.shape[1]))

    def with_features(self, features: range) -> StoredRows:
        """Only these of all its features. Raises ValueError where they are not in order, or begin within a span."""
        if features == self.features:
            return self
        name = self.parts[0][0]
        if self.feature_order is not None:
            raise ValueError(f"the features of {name} lie in an order of their own (act-order)")
        if any(end % self.feature_step for end in (features.start, features.stop) if end != self.features.stop):
            raise ValueError(
                f"{name} is stored in groups of {self.feature_step} features, and a part of it would have those from "
                f"{features.start} to {features.stop - 1}"
            )
        return replace(self, features=features, shape=(self.shape[0], len(features)))


class StoredBlocks:
    """Those of a target's weights that are stored in blocks, by our names. Each is read when it is asked for."""

    def __init__(self, weights: Weights, source: BlockSource, tied: bool):
        """`tied`: whether the embedding is the LM head too."""
        shapes = source.shapes()
        self._source = source
        self._matrices: dict[str, list[list[StoredRows]]] = {}
        self.widened: dict[str, str] = {}
        """How quantized weights that no operator takes as they are are quantized, by Hugging Face name"""
        self._same = {"lm_head.weight": "embedding.weight"} if tied else {}
        for name, weight in weights.items():
            if matrices := self._in_blocks(name, weight, {part: shapes[part].shape for part in weight.sources}):
                self._matrices[name] = matrices
                continue
            kinds = {part: source.quantization(part) for part in weight.sources}
            self.widened |= {part: kind for part, kind in kinds.items() if kind}
        self.unread = set(self._matrices)
        """Those that nothing asked for yet"""

    def __contains__(self, name: str) -> bool:
        return self._same.get(name, name) in self._matrices

    def matrices(self, name: str) -> list[list[StoredRows]]:
        """A weight's matrix, or those of a stack: its rows, one below the other; neighbours of one form are one."""
        self.unread.discard(self._same.get(name, name))
        return self._of(name)

    def feature_step(self, name: str) -> int:
        """The largest `feature_step` of a weight's rows."""
        return max(part.feature_step for matrix in self._of(name) for part in matrix)

    def nbytes(self, name: str) -> int:
        """The size of one, packed."""
        return sum(block_bytes(part.form, part.shape) for matrix in self._of(name) for part in matrix)

    def part(self, rows: Mapping[str, np.ndarray], features: Mapping[str, range]) -> StoredBlocks:
        """Those of a part of the target: of some weights these rows, which ascend, of others these features, of the
        rest all. The LM head is then no longer the embedding. Raises ValueError where features are not whole groups, or
        not in order."""
        result = copy(self)
        result._matrices = {
            name: [list(_part(matrix, rows.get(name), features.get(name))) for matrix in self._of(name)]
            for name in (*self._matrices, *self._same)
            if name in self
        }
        result._same, result.unread = {}, set(result._matrices)
        return result

    def first_rows(self, name: str, count: int) -> Tensor:
        """A weight's first rows float32 [count or fewer, ...]: of a stack its first matrices. Raises ValueError for
        damaged blocks."""
        matrices = self._of(name)
        if len(matrices) > 1:
            return torch.from_numpy(np.stack([_first_rows(matrix) for matrix in matrices[:count]]))
        return torch.from_numpy(_first_rows(matrices[0], count))

    def _of(self, name: str) -> list[list[StoredRows]]:
        return self._matrices[self._same.get(name, name)]

    def _in_blocks(self, name: str, weight: Weight, shapes: Mapping[str, torch.Size]) -> list[list[StoredRows]]:
        """A weight's matrices; none where a source of it is not in blocks, or operators do not take them so."""
        forms = {part: self._source.form(part) for part in shapes}
        orders = row_orders(weight, [shape[0] for shape in shapes.values()]) if all(forms.values()) else None
        matrices = []
        for order in orders or []:
            parts = [(weight.sources[i], rows) for i, rows in order]
            feature_orders = [self._source.feature_order(part) for part, _ in parts]
            if not all(same_order(feature_orders[0], other) for other in feature_orders):
                return []
            if feature_orders[0] is not None and (len(orders or []) > 1 or name == "embedding.weight"):
                return []  # of these operators take the features in order
            if not _fits([forms[part] for part, _ in parts], [len(rows) for _, rows in parts]):
                return []
            groups = groupby(parts, lambda part: forms[part[0]])
            matrices.append([self._rows(str(form), tuple(group), shapes) for form, group in groups])
        return matrices

    def _rows(
        self, form: str, parts: tuple[tuple[str, np.ndarray], ...], shapes: Mapping[str, torch.Size]
    ) -> StoredRows:
        shape = sum(len(rows) for _, rows in parts), shapes[parts[0][0]][-1]
        order = self._source.feature_order(parts[0][0])
        return StoredRows(block_form(form), shape, self._source, parts, order, range(shape[1]))


def _part(matrix: Sequence[StoredRows], rows: np.ndarray | None, features: range | None) -> Iterator[StoredRows]:
    """Some rows or features of a matrix."""
    first = 0
    for stored in matrix:
        index = None if rows is None else rows[(rows >= first) & (rows < first + stored.shape[0])] - first
        first += stored.shape[0]
        if index is None:
            yield stored if features is None else stored.with_features(features)
        elif len(index):
            yield stored.with_rows(index)


def _first_rows(matrix: Sequence[StoredRows], count: int | None = None) -> np.ndarray:
    """A matrix's first rows, or all, float32 [N, K]."""
    missing = sum(part.shape[0] for part in matrix) if count is None else count
    read: list[np.ndarray] = []
    for part in matrix:
        if missing > 0:
            read.append(part.rows(slice(missing)).dequantized())
            missing -= len(read[-1])
    return np.concatenate(read)


def row_orders(weight: Weight, counts: Sequence[int]) -> list[list[tuple[int, np.ndarray]]] | None:
    """For each of a weight's matrices, of which a stack has several, the sources that it has rows of, by their place,
    and which rows, in our order; the sources have so many rows each. None where our weight is more than the sources'
    rows one below the other."""
    bounds = [0, *accumulate(counts)]
    numbers = torch.arange(bounds[-1])[:, None]
    changed = weight.read([numbers[begin:end] for begin, end in pairwise(bounds)])
    if changed.dtype != numbers.dtype or changed.ndim not in (2, 3):
        return None
    orders = []
    for rows in changed.reshape(-1, *changed.shape[-2:])[..., 0].numpy():
        source = np.searchsorted(bounds, rows, side="right") - 1
        if (np.diff(source) < 0).any():
            return None
        orders.append([(int(i), rows[source == i] - bounds[i]) for i in np.unique(source)])
    return orders


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
    return BlockWeight(first.form, np.concatenate([weight.codes for weight in weights]), parts, first.feature_order)
