"""What requests gain is counted whenever somebody reads, and once."""

from __future__ import annotations

from collections import Counter

import numpy as np

from redraft import metrics
from redraft.request import SequenceStats
from redraft.scheduling.counts import MOST_NOTED, EngineMetrics


def samples(counted: EngineMetrics) -> dict[tuple[str, ...], float]:
    """The values on the page by name and labels."""
    counted.page()
    return {
        (sample.name.removeprefix(metrics.PREFIX).removesuffix("_total"), *sample.labels.values()): sample.value
        for family in counted.collect()
        for sample in family.samples
    }


def test_what_requests_gain_is_counted_by_method():
    """Of those that run as of those that have ended. A method that drafts nothing has no series of drafts."""
    rng, counted, expected = np.random.default_rng(0), EngineMetrics(), Counter()
    running: list[tuple[str, SequenceStats]] = []
    for step in range(200):
        if step % 20 == 0:
            running.append((("plain", "a", "b")[step // 20 % 3], SequenceStats()))
            counted.follow(*running[-1])
        for method, stats in running:
            drafted = 0 if method == "plain" else int(rng.integers(0, 6))
            accepted = int(rng.integers(0, drafted + 1))
            reused = int(rng.integers(0, accepted + 1))
            stats.steps += 1
            stats.output_tokens += accepted + 1
            stats.rows_executed += drafted + 1
            stats.drafted += drafted
            stats.accepted += accepted
            stats.reused += reused
            for depths, deepest in (
                (stats.offered_by_depth, min(accepted + 1, drafted)),
                (stats.accepted_by_depth, accepted),
            ):
                depths.extend([0] * (drafted - len(depths)))
                depths[:deepest] = [count + 1 for count in depths[:deepest]]
            gained = {
                ("engine_sequence_steps",): 1,
                ("generation_tokens",): accepted + 1,
                ("engine_rows",): drafted + 1,
                ("spec_decode_num_drafts", method): int(drafted > 0),
                ("spec_decode_num_draft_tokens", method): drafted,
                ("spec_decode_num_accepted_tokens", method): accepted,
                ("spec_decode_num_reused_tokens", method): reused,
            }
            gained |= {("spec_decode_num_accepted_tokens_per_pos", method, str(depth)): 1 for depth in range(accepted)}
            expected.update(gained)
        if rng.random() < 0.1:
            counted.count_end("stop", running.pop(0)[1] if running else SequenceStats())
        if rng.random() < 0.1:
            assert samples(counted).items() >= {name: count for name, count in expected.items() if count}.items()
    counted.forget()
    for _, stats in running:
        stats.steps += 1
    values = samples(counted)
    assert {name: values.get(name, 0) for name in expected} == expected
    assert not [name for name in values if "plain" in name]


def test_no_more_times_are_kept_than_are_counted_in_a_step():
    counted = EngineMetrics()
    for _ in range(3 * MOST_NOTED // 8):
        counted.note_step(0.01, 0.008, 0.001, [0.01] * 7)
        assert len(counted._gaps) <= MOST_NOTED
    values = samples(counted)
    assert values["inter_token_latency_seconds_count",] == 7 * values["engine_steps",] == 7 * (3 * MOST_NOTED // 8)


def test_what_drafts_promise_is_counted_by_method():
    counted = EngineMetrics()
    for _ in range(2):
        counted.note_expected({"one": 1.5, "two": 0.25})
    values = samples(counted)
    assert [values["spec_decode_num_expected_tokens", method] for method in ("one", "two")] == [3.0, 0.5]
