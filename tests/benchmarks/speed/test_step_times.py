"""Step times of a bundle, whichever way its drafter drafts."""

from __future__ import annotations

import json

import pytest

from benchmarks.speed import step_times
from redraft.bundle.config import LimitsInfo
from tests.engines.tiny import METHOD, bundle_of_methods, tiny_bundle, tiny_drafter_of, tiny_target

LIMITS = LimitsInfo(slots=3, max_len=60, max_tree=8, prefill_chunk=16)


@pytest.mark.parametrize(
    "plan", [{}, {"construction": "stochastic_beam", "levels": (3, 2), "support": 13}], ids=["beams", "draws"]
)
def test_drafting_is_timed_for_as_many_sequences_as_there_are_slots(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "CONTEXT", 32)
    bundle = tiny_bundle(tmp_path, tiny_target(), limits=LIMITS, **plan)
    step_times.main(bundle.path, tmp_path / "times.json", repeats=1, threads=1)
    times = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert {entry["method"] for entry in times} == {None, METHOD}
    assert max(entry["rows"] for entry in times) == 16, "the most of a prompt that a step has"
    assert [entry["sequences"] for entry in times if not entry["rows"]] == [1, 2]
    assert all(entry["median_ms"] > 0 for entry in times)


@pytest.mark.slow
def test_every_drafter_of_a_bundle_is_timed(tmp_path, monkeypatch, capsys):
    """It would catch a drafter, or one that draws, that the command leaves out."""
    monkeypatch.setattr(step_times, "CONTEXT", 32)
    target = tiny_target()
    methods = {kind: (tiny_drafter_of(target, kind), {}) for kind in ("recurrent", "eagle")}
    draws = {"construction": "stochastic_beam", "levels": (3, 2), "support": 13}
    bundle = bundle_of_methods(tmp_path, target, methods | {"draws": (tiny_drafter_of(target, "medusa"), draws)})
    step_times.main(bundle.path, tmp_path / "times.json", repeats=1, threads=1)
    drafting = [entry for entry in json.loads((tmp_path / "times.json").read_text())["rows"] if not entry["rows"]]
    found = [(entry["method"], entry["sequences"]) for entry in drafting]
    assert found == [(name, count) for name in ("recurrent", "eagle", "draws") for count in (1, 2, 4, 8)]
    assert "eagle: draft for 4" in capsys.readouterr().out
