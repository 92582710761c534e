"""What a report of structured answers says of its runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.verify.structured import Run, speed_table, summary, texts_table
from redraft.request import AUTO_REGRESSIVE

PLAN = SimpleNamespace(near_tie=0.001, speed=True)
REFUSED = {
    "a": {"error": "guide.text: no", "seconds": 1.5, "schema": True},
    "b": {"error": "max_tokens: no", "seconds": 0.1, "schema": False},
}


def one(case: str, method: str, **fields: Any) -> Run:
    known = {"guided": True, "finish": "stop", "valid": True, "tokens": 60, "steps": 59, "drafted": 0, "accepted": 0}
    return Run(case, "greedy", method, **known | {"decode_ms": 600.0, "grammar_ms": 59.0} | fields)


def test_counts_and_speed_by_method():
    fast = {"steps": 20, "accepted": 39, "decode_ms": 300.0, "grammar_ms": 40.0}
    runs = [
        *(one(case, AUTO_REGRESSIVE) for case in "xyz"),
        one("x", "m", **fast),
        one("y", "m", **fast, margin=0.0005),
        one("z", "m", **fast | {"finish": "length", "valid": None}, margin=0.5),
        one("x", AUTO_REGRESSIVE, guided=False, valid=None, finish="length"),
        one("x", "m", guided=False, valid=None, finish="length", decode_ms=400.0),
    ]
    report = summary({"bundle": "b"}, REFUSED, runs, PLAN)
    assert (report["refused"], report["too_long"], report["slowest_refusal_s"]) == (1, 1, 1.5)
    assert [row[:7] for row in texts_table(report).rows] == [
        [AUTO_REGRESSIVE, "greedy", "3", "3", "3", "0", "0"],
        ["m", "greedy", "3", "2", "2", "1", "1"],
    ]
    assert [run["case"] for run in report["differences"]] == ["y", "z"]
    speeds = {(row["method"], row["grammar"]): row["speedup"] for row in report["speed"]}
    assert speeds["m", True] == pytest.approx(2)
    assert speeds["m", False] == pytest.approx(1.5)
    rows = {tuple(row[:3]): row[3:5] for row in speed_table(report).rows}
    assert rows["m", "greedy", "JSON"] == ["2.95", "2.00"]


def test_an_answer_that_is_not_valid_is_told():
    report = summary({}, {}, [one("x", AUTO_REGRESSIVE, valid=False)], SimpleNamespace(near_tie=0.001, speed=False))
    assert [run["case"] for run in report["invalid"]] == ["x"]
    assert report["texts"][0]["finished"] == 1
    assert report["texts"][0]["valid"] == 0
