"""Lyanna's tables and figures beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from redraft.loadtest.tables import Table
from redraft.request import AUTO_REGRESSIVE
from studies.figures.contenders import NAMES, Load, contenders, more_than_first, speedup

COMPARED = ("lyanna", "eagle", "sps_tree")
"""Methods of studies/methods/lyanna.toml."""


def batches(load: Load) -> Table:
    """Tokens/s by temperature and batch size at the paper's setting, over auto-regressive decoding."""
    reports = [load(name) for name in ("lyanna_batches", "lyanna_batches_sampled")]
    sizes = (1, 4, 16)
    table = Table("Trees 3 deep, 4 wide, 12 nodes", ["T", "method", *(f"{batch} at once" for batch in sizes)])
    for report in reports:
        rates = {(row["method"], row["batch"]): row["tokens_per_s"] for row in report["cells"]}
        base = [rates[AUTO_REGRESSIVE, batch] for batch in sizes]
        at = f"{report['temperature']:g}"
        table.rows.append([at, "auto-regressive, tokens/s", *(f"{rate:.0f}" for rate in base)])
        for name in COMPARED:
            ratios = [f"{rates[name, batch] / rate:.2f}x" for batch, rate in zip(sizes, base, strict=True)]
            table.rows.append([at, NAMES[name], *ratios])
    return table


def fusion(load: Load) -> Table:
    """Re-sampling in trees of the paper: speed-up, and how many more tokens per step than without."""
    labels = {"off_12": "off", "fused_12": "fused with the new draft", "alone_12": "instead of a draft"}
    columns = [text for t in ("0", "1") for text in (f"speed-up, T = {t}", "tokens/step more than off")]
    table = Table("Re-sampling, trees 3 deep, 4 wide, 12 nodes", ["re-sampling", *columns])
    measured = [contenders(load("zen4/resampling_12"), t) for t in ("0", "1")]
    for name, label in labels.items():
        figures = [cell for entries in measured for cell in (speedup(entries[name]), more_than_first(entries[name], 3))]
        table.rows.append([label, *figures])
    return table
