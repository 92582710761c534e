"""The reference of `Norm` in float64 numpy."""

from __future__ import annotations

import numpy as np


def norm(x: np.ndarray, weight: np.ndarray, eps: float, bias: np.ndarray | None = None) -> np.ndarray:
    """The RMS norm of x [..., K] with weight [K], or its LayerNorm where there is a bias [K]: float64 [..., K]."""
    x = np.asarray(x, np.float64)
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    normalized = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normalized if bias is None else normalized + bias
