"""Intervals over prompts, by the bootstrap with the same re-drawn prompts for everything that is compared; and over
runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
_SEED = 20
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantile of Student's t with 1, 2, 3, ... degrees of freedom."""
MOST_RUNS = len(T95) + 1


def resampled_prompts(prompts: int) -> np.ndarray:
    """How often each prompt is drawn in each re-sample, int64 [RESAMPLES, prompts]; the same for the same arguments."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle 95% of re-sampled values float [N]; nan where there are none."""
    low, high = np.nanpercentile(values, [2.5, 97.5]) if len(values) else (np.nan, np.nan)
    return float(low), float(high)


def ratio(tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
    """Sum of `tops` over sum of `bottoms`, float [prompts] each, in every re-sample: float64 [RESAMPLES]."""
    draws = resampled_prompts(len(tops))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (draws @ tops) / (draws @ bottoms)


def over_runs(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of 1 to MOST_RUNS values, and half the width of its 95% interval by Student's t; None for one value."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None
    return mean, float(T95[len(values) - 2] * np.std(values, ddof=1) / len(values) ** 0.5)
