"""Log-probabilities of tokens under the target's own distribution, before processors and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from redraft.request import Alternatives


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of the probabilities of n tokens, and of the k most likely tokens at each one's place."""

    chosen: np.ndarray  # float64 [n]
    best: np.ndarray  # int64 [n, k], token ids in the order of `Alternatives`
    values: np.ndarray  # float64 [n, k]

    @classmethod
    def of(cls, logits: np.ndarray, tokens: Sequence[int], alternatives: int = 0) -> LogProbs:
        """Those of tokens, each chosen from a row of logits float32 [n, V], with so many alternatives, at most V."""
        top = logits.max(axis=1, keepdims=True)
        exponentials = logits - top
        np.exp(exponentials, out=exponentials)
        norms = top + np.log(exponentials.sum(axis=1, dtype=np.float64, keepdims=True))
        best = _most_likely(logits, min(alternatives, logits.shape[1]))
        chosen = np.asarray(tokens, dtype=np.int64).reshape(-1, 1)
        values = [np.take_along_axis(logits, ids, axis=1) - norms for ids in (chosen, best)]
        return cls(values[0][:, 0], best, values[1])

    @cached_property
    def top(self) -> list[Alternatives]:
        """The alternatives to each token."""
        pairs = zip(self.best.tolist(), self.values.tolist(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in pairs]


def _most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids int64 [n, count] of each row's largest logits float32 [n, V]."""
    if not count:
        return np.empty((len(logits), 0), dtype=np.int64)
    least = np.partition(logits, -count, axis=1)[:, -count, None]
    rows, ids = np.nonzero(logits >= least)  # more than `count` of a row where logits are equal
    order = np.lexsort((ids, -logits[rows, ids], rows))
    starts = np.searchsorted(rows, np.arange(len(logits)))
    return ids[order][starts[:, None] + np.arange(count)]
