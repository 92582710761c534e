"""The reference of `Embedding`."""

from __future__ import annotations

import numpy as np

from redraft.plugins.operators.linear.reference import stored


def embedding(
    ids: np.ndarray,
    weight: np.ndarray,
    precision: str = "fp32",
    *,
    clamped: bool = False,
    factor: float = 1.0,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Rows `ids` of weight [N, K] as stored, times `factor`, and the residual [T, K]: float32 [T, K]."""
    if clamped:
        ids = np.minimum(ids, len(weight) - 1)
    rows = stored(weight, precision)[ids] * np.float32(factor)
    return rows if residual is None else rows + residual
