"""The reference of `Experts` in float64 numpy, row by row."""

from __future__ import annotations

import numpy as np

from redraft.plugins.operators.linear.reference import linear


def experts(
    x: np.ndarray,
    router: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    chosen: int,
    normalized: bool,
    precision: str = "fp32",
    activation: str = "swiglu",
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """x float [T, H], router logits [T, E], gate_up [E, 2C, H], down [E, H, C]; returns float64 [T, H]."""
    out = np.zeros(x.shape) if residual is None else residual.astype(np.float64)
    for t, logits in enumerate(router.astype(np.float64)):
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        best = np.argsort(-chances, kind="stable")[:chosen]
        total = chances[best].sum() if normalized else 1.0
        for e in best:
            inner = linear(x[t : t + 1], gate_up[e], precision, activation=activation)
            out[t] += chances[e] / total * linear(inner.astype(np.float32), down[e], precision)[0]
    return out
