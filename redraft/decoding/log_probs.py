"""Log-probabilities of tokens under the target's own distribution, before processors and filters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

Alternatives = list[tuple[int, float]]
"""The most likely tokens at a place, each with its log-probability, the most likely first, of equals the lowest id."""


@dataclass
class LogProbs:
    """Natural logarithms of the probabilities of n tokens and, where asked for, n lists of alternatives to them."""

    chosen: list[float] = field(default_factory=list)
    top: list[Alternatives] = field(default_factory=list)

    def add(self, rows: Iterable[np.ndarray], tokens: Iterable[int], alternatives: int = 0) -> None:
        """Append those of tokens, each chosen from a row of logits float32 [V], with so many alternatives."""
        for logits, token in zip(rows, tokens, strict=True):
            top = logits.max()
            norm = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
            self.chosen.append(float(logits[token]) - norm)
            if alternatives:
                ids = _likeliest(logits, alternatives)
                values = logits[ids].astype(np.float64) - norm
                self.top.append(list(zip(ids.tolist(), values.tolist(), strict=True)))


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids int [count] of the largest logits float32 [V]; all where V is smaller."""
    count = min(count, len(logits))
    ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
