"""ReDrafter's tables beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from redraft.loadtest.tables import Table
from studies.figures.contenders import (
    Load,
    accepted,
    contenders,
    served,
    speedup,
)

TABLE_2 = {0.1: 2.09, 0.5: 2.11, 1: 1.57}
"""ReDrafter, table 2: speed-up of Vicuna 7B by requests per second."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TABLE_6 = {"with": {1: 2.35, 4: 2.73, 16: 3.09, 64: 3.58}, "without": {1: 2.21, 4: 2.48, 16: 2.87, 64: 3.30}}
"""ReDrafter, table 6: tokens per step by beam width, with and without distillation."""


def table2(load: Load) -> Table:
    """ReDrafter's beams through Triton at fixed request rates."""
    return served(load("redrafter_table2"), TABLE_2)


def table4(load: Load) -> Table:
    """Live beams of length 4 by width, as in the paper's table of Apple's hardware."""
    table = Table("Beams of length 4", ["beam width", "speed-up", "tokens/step", "rows per step"])
    result = contenders(load("zen4/beam_shapes_live"), "0")
    for width in range(1, 5):
        entry = result[f"w{width}l4"]
        table.rows.append([str(width), speedup(entry), accepted(entry), f"{entry['rows_per_step']:.1f}"])
    return table


def table6(load: Load) -> Table:
    """Tokens per step of drafters trained with and without distillation."""
    labels = {
        "generated": "distilled: the target's answers, soft labels",
        "text_soft": "the data's answers, soft labels",
        "text_hard": "the data's answers, hard labels",
    }
    results = load("distillation")["drafters"]
    widths = [row["width"] for row in results["generated"]]
    table = Table("Tokens per step by beam width", ["training", *(f"width {width}" for width in widths)])
    for name, label in labels.items():
        table.rows.append([label, *(f"{row['acceptance_length']:.2f} ±{row['interval']:.2f}" for row in results[name])])
    pairs = zip(results["generated"], results["text_hard"], strict=True)
    gains = [f"{best['acceptance_length'] / plain['acceptance_length'] - 1:+.1%}" for best, plain in pairs]
    table.rows.append(["first over last", *gains])
    paper = [f"{TABLE_6['with'][width] / TABLE_6['without'][width] - 1:+.1%}" for width in widths]
    table.rows.append(["the paper's, Vicuna 7B", *paper])
    return table
