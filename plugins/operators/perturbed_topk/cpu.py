"""`PerturbedTopK` by the CPU kernel, without OpenVINO."""

from __future__ import annotations

import numpy as np

from redraft.plugins.kernels import call


def perturbed_topk(
    values: np.ndarray,
    ids: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    sharpness: np.ndarray,
    *,
    level: int,
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """values float32 and ids int32 [N, m], then seeds int32 [B, 2] and the others [B], to scores float32 and ids int32
    [N, k]; see README.md."""
    rows, most = values.shape
    scores, chosen = np.empty((rows, k), np.float32), np.empty((rows, k), np.int32)
    call(
        "perturbed_topk",
        values=values,
        ids=ids,
        rows=rows,
        m=most,
        sequences=len(seeds),
        seeds=seeds,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        sharpness=sharpness,
        level=level,
        k=k,
        next_values=scores,
        next_ids=chosen,
    )
    return scores, chosen
