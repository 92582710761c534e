"""What is noted of steps is counted."""

from __future__ import annotations

from collections import Counter

import numpy as np

from redraft import metrics
from redraft.request_state import Gain
from redraft.scheduling.counts import MOST_NOTED, EngineMetrics


def test_what_steps_gained_is_counted():
    """By method, however many notes are counted together; steps that drafted nothing are no drafts."""
    rng, counted, expected = np.random.default_rng(0), EngineMetrics(), Counter()
    methods = ("a", "b", "plain")
    for _ in range(2 * MOST_NOTED // len(methods)):
        for method in methods:
            drafted = 0 if method == "plain" else int(rng.integers(0, 6))
            accepted = int(rng.integers(0, drafted + 1))
            gain = Gain(accepted + 1, drafted, accepted, int(rng.integers(0, accepted + 1)), drafted + 1)
            counted.note_gain(method, gain, 0.01)
            expected.update(
                {
                    ("engine_sequence_steps", ()): 1,
                    ("generation_tokens", ()): gain.output_tokens,
                    ("engine_rows", ()): gain.rows_executed,
                    ("spec_decode_num_drafts", (method,)): int(drafted > 0),
                    ("spec_decode_num_draft_tokens", (method,)): drafted,
                    ("spec_decode_num_accepted_tokens", (method,)): accepted,
                    ("spec_decode_num_reused_tokens", (method,)): gain.reused,
                }
                | {("spec_decode_num_accepted_tokens_per_pos", (method, str(depth))): 1 for depth in range(accepted)}
            )
        counted.note_step(0.01, 0.008, 0.001)
    assert sum(expected[metrics.DRAFT_TOKENS.name, (method,)] for method in methods) == counted.total(
        metrics.DRAFT_TOKENS
    )
    samples = {
        (family.name.removeprefix(metrics.PREFIX), tuple(sample.labels.values())): sample.value
        for family in counted.collect()
        for sample in family.samples
    }
    for key, count in expected.items():
        assert samples.get(key, 0) == count, key
    assert samples["inter_token_latency_seconds", ()] > 0
