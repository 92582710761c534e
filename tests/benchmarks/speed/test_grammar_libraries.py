"""What the comparison of grammar libraries measures, and what it says of schemas that are refused."""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks.speed import grammar_libraries
from tests.grammar.tokens import CODEC, SCHEMA


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with a tokenizer, and only llguidance installed."""
    (tmp_path / "tokenizer.json").write_text(CODEC.json())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_a_report(model, capsys):
    cases = {"good": SCHEMA, "never": {"enum": []}}
    lines = [json.dumps({"name": name, "prompt": "", "schema": schema}) for name, schema in cases.items()]
    (model / "s.jsonl").write_text("\n".join(lines))
    given = {"--model": model, "--schemas": model / "s.jsonl", "--output": model / "r.json"}
    grammar_libraries.main([str(one) for pair in given.items() for one in pair])
    report = json.loads((model / "r.json").read_text())
    found = report["libraries"]["llguidance"]
    assert found["schemas"] == 1
    assert list(found["ms"]) == ["compile", "mask", "copy", "forced"]
    assert all(0 < median <= high for median, high in found["ms"].values())
    assert [line.split(":")[0] for line in report["refused"]] == ["llguidance, never"]
    made, packed = report["us_per_row"]["made"], report["us_per_row"]["packed"]
    assert report["rows"] == 16
    assert 0 < packed[0] < made[0] <= made[1]
    shown = capsys.readouterr().out
    assert f"{found['ms']['mask'][1]:.3f}" in shown
    assert f"{made[0]:.1f}" in shown
