"""The reference of `LinearTopK` in float64 numpy."""

from __future__ import annotations

import numpy as np

from redraft.plugins.operators.linear.reference import linear


def linear_topk(
    x: np.ndarray,
    weight: np.ndarray,
    k: int,
    precision: str = "fp32",
    *,
    ids: np.ndarray | None = None,
    **options: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities float64 [T, k], descending (ties: lower index first), and their indices int32 [T, k]."""
    logits = linear(x, weight, precision, **options)  # type: ignore[arg-type]
    top = logits.max(-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1, kind="stable")[:, :k]
    indices = order if ids is None else ids[order]
    return np.take_along_axis(log_probs, order, -1), indices.astype(np.int32)
