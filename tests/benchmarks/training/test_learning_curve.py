"""Learning curves from training logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure

from benchmarks.training import learning_curve


def write_run(folder: Path, records: int, depths: int = 5) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {
            "step": 100 * i,
            "positions": 50_000 * i,
            "hours": 0.01 * i,
            "loss": 9.0 - i,
            "rate": 1500,
            "conditional_acceptance": [0.1 * i - 0.01 * depth for depth in range(depths)],
            "chain_acceptance_length": 1 + 0.15 * i,
        }
        for i in range(1, records + 1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_run_is_a_line_in_every_panel(tmp_path: Path, monkeypatch, capsys):
    runs = [write_run(tmp_path / "a/hidden_state", 4), write_run(tmp_path / "b/hidden_state", 3, depths=2)]
    figures: list[Figure] = []
    monkeypatch.setattr(learning_curve, "save", lambda figure, path: figures.append(figure) or path)
    learning_curve.main(runs, tmp_path / "plot.png")
    axes = figures[0].axes
    assert [axis.get_title(loc="left") for axis in axes][1:] == [
        "Acceptance length, chain",
        "Acceptance length, chain",
        "Acceptance at depth 1",
        "Acceptance at depth 2",
    ]
    assert axes[2].lines[0].get_xdata() == pytest.approx([0.01, 0.02, 0.03, 0.04])
    first, second = axes[4].lines
    assert (first.get_label(), second.get_label()) == ("a/hidden_state", "b/hidden_state")
    assert first.get_xdata() == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert second.get_ydata() == pytest.approx([0.09, 0.19, 0.29])
    printed = capsys.readouterr().out
    assert "200,000" in printed
    assert "1.600" in printed


def test_hours_follow_from_rates():
    records = [{"positions": positions, "rate": rate} for positions, rate in ((3600, 1), (7200, 2), (14400, 0.5))]
    assert learning_curve.hours_of(records) == [1, 1.5, 5.5]
    assert learning_curve.hours_of([{"positions": 7, "rate": 1, "hours": 0.5}]) == [0.5]


def test_a_log_bears_the_name_of_its_folder():
    logs = [Path("drafters/small/training.jsonl"), Path("drafters/small-eagle/training.jsonl"), Path("artifacts/new")]
    assert learning_curve.labels_of(logs) == ["small", "small-eagle", "new"]


def test_the_plot_is_written(tmp_path: Path):
    learning_curve.main([write_run(tmp_path / f"run{i}", 2) for i in range(7)], tmp_path / "new/plot.png")
    assert (tmp_path / "new/plot.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_a_log_are_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(typer.BadParameter, match="no training log"):
        learning_curve.main([tmp_path / "empty"], tmp_path / "plot.png")
    (tmp_path / "empty/log.jsonl").touch()
    with pytest.raises(typer.BadParameter, match="no record yet"):
        learning_curve.main([tmp_path / "empty"], tmp_path / "plot.png")
    run = write_run(tmp_path / "run", 2)
    with pytest.raises(typer.BadParameter, match="given twice"):
        learning_curve.main([run, run], tmp_path / "plot.png")
