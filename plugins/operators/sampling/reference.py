"""The draw of a token in numpy: slow and obvious, to compare kernels with."""

from __future__ import annotations

import numpy as np


def support(logits: np.ndarray, inverse_temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [n], ascending, that top-k (0: all) and then top-p (1: all) keep of logits float32 [V], and their
    weights float32 [n]; of equal ones the lower ids."""
    ids = np.arange(len(logits))
    if 0 < top_k < len(logits):
        ids = np.sort(np.argsort(-logits, kind="stable")[:top_k])
    weights = np.exp((logits[ids] - logits.max()) * np.float32(inverse_temperature))
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        mass = weights[order].cumsum(dtype=np.float64)
        kept = np.sort(order[: int(mass.searchsorted(top_p * mass[-1])) + 1])
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def winner(ids: np.ndarray, weights: np.ndarray, noise: np.ndarray) -> int:
    """The token of the least noise / weight, of tokens int [n] with weights and noise float32 [n]; of equal ones the
    lower."""
    with np.errstate(divide="ignore"):
        return int(ids[(noise / weights).argmin()])
