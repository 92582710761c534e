"""The reference of `Embedding`."""

from __future__ import annotations

import numpy as np

from redraft.plugins.operators.linear.reference import stored


def embedding(ids: np.ndarray, weight: np.ndarray, dtype: str = "fp32") -> np.ndarray:
    """Rows `ids` of weight [N, K] as stored: float32 [T, K]."""
    return stored(weight, dtype)[ids]
