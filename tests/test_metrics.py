"""The metrics' values."""

from __future__ import annotations

import numpy as np

from redraft.metrics import STEP_GAP, Metrics


def test_values_that_are_observed_together_count_as_each_would():
    """At a bucket's bound, in the last bucket, and none."""
    together, each = Metrics([STEP_GAP]), Metrics([STEP_GAP])
    times = np.random.default_rng(0).exponential(0.02, 300).tolist()
    for values in (times, [*STEP_GAP.buckets, 0.0, 7.0], []):
        together[STEP_GAP].observe_all(values)
        for value in values:
            each[STEP_GAP].observe(value)
    assert together.page().decode().splitlines()[:-1] == each.page().decode().splitlines()[:-1]
    sums = (metrics.registry.get_sample_value(f"{STEP_GAP.series}_sum") for metrics in (together, each))
    np.testing.assert_allclose(*sums)
