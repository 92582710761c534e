"""Lyanna's table 2 from training logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import training_table


def write_run(folder: Path, positions: list[int], offset: float) -> str:
    folder.mkdir()
    records = [
        {"positions": count, "conditional_acceptance": [offset + count / 1000, 0.3, 0.2, 0.9]} for count in positions
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_runs_side_by_side_where_both_were_evaluated(tmp_path, capsys):
    runs = [write_run(tmp_path / "sparse", [100, 200, 300], 0.1), write_run(tmp_path / "dense", [100, 300, 400], 0.04)]
    training_table.main([*runs, "--output", str(tmp_path / "r.json")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["│", "sparse", "│", "23.33%", "│", "30.00%", "│"] in lines
    assert ["│", "dense", "│", "21.33%", "│", "28.00%", "│"] in lines
    assert any(line[1:5] == ["sparse", "over", "dense,", "points"] and "+2.00" in line for line in lines)
    written = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert written["dense"]["400"] == pytest.approx((0.44 + 0.3 + 0.2) / 3)


def test_the_mean_of_several_seeds_has_an_interval(tmp_path):
    """Of 0.2 and 0.24 it is 0.22 ± 12.706 * 0.02; the other run's batches hold a few more positions."""
    for seed, (count, offset) in enumerate(((100, 0.0), (104, 0.116))):
        (tmp_path / "sparse").mkdir(exist_ok=True)
        write_run(tmp_path / "sparse" / str(seed), [count], offset)
    run = training_table.read_run(tmp_path / "sparse", 3)
    assert run == {100: (pytest.approx(0.22), pytest.approx(12.706 * 0.02))}
    assert training_table.percent(*run[100]) == "22.00% ±25.41%"
    write_run(tmp_path / "sparse" / "2", [100, 200], 0.1)
    with pytest.raises(ValueError, match="not evaluated equally often"):
        training_table.read_run(tmp_path / "sparse", 3)


@pytest.mark.parametrize(
    ("positions", "steps", "message"),
    [([100], "5", "a run logged 4 steps, expected at least 5"), ([7], "3", "no evaluation at the same number")],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys, positions, steps, message):
    runs = [write_run(tmp_path / "a", [100], 0.1), write_run(tmp_path / "b", positions, 0.1)]
    with pytest.raises(SystemExit):
        training_table.main([*runs, "--steps", steps, "--output", str(tmp_path / "r.json")])
    assert message in capsys.readouterr().err
