"""What a hot vocabulary covers, judged on other answers than it was chosen on."""

import json

import numpy as np
import pytest
import typer

from benchmarks.training import token_frequency


def test_coverage_is_of_the_other_half():
    chosen_on, judged_on = np.array([5, 0, 9, 1]), np.array([1, 4, 3, 2])
    np.testing.assert_allclose(token_frequency.coverage(chosen_on, judged_on), [0.3, 0.4, 0.6, 1.0])


def test_table_and_json(tmp_path, capsys):
    np.save(tmp_path / "token_counts.npy", np.ones((2, 5000), int))
    token_frequency.main(tmp_path / "token_counts.npy", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["covered"]["1024"] == 0.2048
    printed = capsys.readouterr().out
    assert "10,000 tokens; 5,000 of 5,000 are used" in printed
    assert "20.48%" in printed


def test_a_file_of_another_kind_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(7))
    with pytest.raises(typer.BadParameter, match=r"shape \(7,\), expected \[2, V\]"):
        token_frequency.main(tmp_path / "x.npy", tmp_path / "plot.json")
