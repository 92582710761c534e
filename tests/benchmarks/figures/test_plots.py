"""Plots as SVG."""

from __future__ import annotations

import re

import matplotlib as mpl

from benchmarks.figures.plots import new_figure, save

DRAWN = re.compile(r"<(path|use|text|clipPath|rect)\b")


def test_a_compact_svg_draws_the_same(tmp_path):
    """Coordinates are rounded, texts are not. Only groups that have no look go."""
    figure, (axis,) = new_figure(1)
    axis.plot([0, 1 / 3, 1], [0.001234, 0.002, 0.003], "o-", label="0.98765 & <more>")
    axis.legend()
    with mpl.rc_context({"svg.fonttype": "none"}):
        svg = save(figure, tmp_path / "compact.svg").read_text()
        figure.savefig(tmp_path / "whole.svg")
    whole = (tmp_path / "whole.svg").read_text()
    assert len(svg) < 0.7 * len(whole)
    assert DRAWN.findall(svg) == DRAWN.findall(whole)
    assert "0.98765 &amp; &lt;more&gt;" in svg
    assert not re.search(r' (d|x|y)="[^"]*\.\d{3}', svg)
