"""Step times of a bundle, whichever way its drafter drafts."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_times
from redraft.bundle import LimitsInfo
from tests.engines.tiny import tiny_bundle, tiny_target

LIMITS = LimitsInfo(slots=3, max_len=60, max_tree=8, prefill_chunk=16)


@pytest.mark.parametrize(
    "plan", [{}, {"construction": "stochastic_beam", "levels": (3, 2), "support": 13}], ids=["beams", "draws"]
)
def test_drafting_is_timed_for_as_many_sequences_as_there_are_slots(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "CONTEXT", 32)
    bundle = tiny_bundle(tmp_path, tiny_target(), limits=LIMITS, **plan)
    step_times.main(bundle.path, tmp_path / "times.json", repeats=1, threads=1)
    times = json.loads((tmp_path / "times.json").read_text())
    assert [entry["sequences"] for entry in times if not entry["rows"]] == [1, 2]
    assert all(entry["median_ms"] > 0 for entry in times)
