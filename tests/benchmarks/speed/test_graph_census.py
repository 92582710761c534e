"""The census of CUDA graphs, against sums by hand."""

from __future__ import annotations

from benchmarks.speed import graph_census


def test_a_census_of_llamas_graphs(capsys):
    limits = ["--slots", "2", "--max-tree", "2", "--prefill-chunk", "3"]
    graph_census.main([*limits, "--vocabulary", "1000000", "--hidden-size", "100"])
    lines = {tuple(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()}
    row = 2 * 1_000_100 / 1e6
    assert {("2", "4", "4", f"{4 * row:.1f}"), ("2", "2", "2", f"{2 * row:.1f}"), ("1", "1", "1", f"{row:.1f}")} < lines
    assert ("1", "3", "2", f"{2 * row + 2 * 100 / 1e6:.1f}") in lines
    kept = [words[-1] for words in sorted(lines) if "shared" in words]
    assert kept == [f"{4 * row:.1f}"]
    own = [words[-1] for words in sorted(lines) if "float32" in words]
    assert own == [f"{(4 + 2 + 2 + 2 + 1) * 2 * row + 4 * 100 / 1e6:.1f}"]
