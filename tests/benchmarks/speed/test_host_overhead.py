"""The null engine drives the scheduler as a real one does, whatever it gives to choose from."""

from __future__ import annotations

import json

import pytest

from benchmarks.command import execute
from benchmarks.speed.host_overhead import METHODS, main

SMALL = ["--concurrency", "1", "3", "--tree-budget", "6", "--steps", "40", "--vocabulary", "300"]


@pytest.fixture
def figures(tmp_path):
    """What a run gives: by streams and method, tokens and rows per step."""

    def run(*options: str) -> dict:
        output = tmp_path / "host.json"
        assert execute(main, [*SMALL, *options, "--output", output]) == 0
        found = json.loads(output.read_text())["figures"]
        assert all(figure["mean_ms"] > 0 for figure in found)
        return {(f["streams"], f["method"]): (f["tokens_per_step"], f["rows_per_step"]) for f in found}

    return run


def test_drafts_are_accepted_and_trees_keep_to_their_budget(figures, capsys):
    found = figures()
    assert set(found) == {(streams, method) for streams in (1, 3) for method in METHODS}
    for streams in (1, 3):
        auto_regressive, *drafting = (found[streams, method] for method in METHODS)
        assert auto_regressive == (1, 1)
        assert all(1.5 < tokens < rows <= 7 for tokens, rows in drafting)
    assert "best-first with n-grams" in capsys.readouterr().out


def test_the_host_chooses_what_the_engine_would(figures):
    assert figures("--logits") == figures()
