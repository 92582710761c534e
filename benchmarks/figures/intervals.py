"""Intervals over prompts: the bootstrap, with the same re-drawn prompts for everything that is compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000
_SEED = 20


def resampled_prompts(prompts: int, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each prompt is drawn in each re-sample, int64 [resamples, prompts]; the same for the same arguments."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle 95% of re-sampled values float [N]; nan where there are none."""
    low, high = np.nanpercentile(values, [2.5, 97.5]) if len(values) else (np.nan, np.nan)
    return float(low), float(high)


def ratio(tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
    """Sum of `tops` over sum of `bottoms`, float [prompts] each, in every re-sample: float64 [RESAMPLES]."""
    draws = resampled_prompts(len(tops))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (draws @ tops) / (draws @ bottoms)


def statistic(of: Callable[[np.ndarray], float], counts: np.ndarray, resamples: int) -> np.ndarray:
    """`of` the summed counts float64 [prompts, C] in every re-sample: float64 [resamples]."""
    return np.array([of(total) for total in resampled_prompts(len(counts), resamples) @ counts])
