"""ReDrafter's tables beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from redraft.loadtest.tables import Table
from studies.figures.contenders import (
    Load,
    accepted,
    contenders,
    gain,
    served,
    speedup,
)

TABLE_2 = {0.1: 2.09, 0.5: 2.11, 1: 1.57}
"""ReDrafter, table 2: speed-up of Vicuna 7B by requests per second."""
TABLE_3 = {1: 2.19, 2: 1.82}
"""ReDrafter, table 3: speed-up of Vicuna 7B by ranks."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TABLE_6 = {"with": {1: 2.35, 4: 2.73, 16: 3.09, 64: 3.58}, "without": {1: 2.21, 4: 2.48, 16: 2.87, 64: 3.30}}
"""ReDrafter, table 6: tokens per step by beam width, with and without distillation."""


def table2(load: Load) -> Table:
    """ReDrafter's beams through Triton at fixed request rates."""
    return served(load("redrafter_table2"), TABLE_2)


def table3(load: Load) -> Table:
    """Speed-up by ranks."""
    reports, titles = (
        {"AMX": load("tensor_parallel"), "no AMX": load("icelake/tensor_parallel")},
        {"redrafter": "beams", "best": "default"},
    )
    columns = [f"{titles[method]}, {machine}" for machine in reports for method in titles]
    paper = "the paper's beams, Vicuna 7B"
    table = Table("Speed-up by ranks", ["temperature", "ranks x threads", *columns, paper])
    ordered = (sorted(report["rows"], key=lambda row: (row["ranks"], row["threads"])) for report in reports.values())
    runs = list(zip(*ordered, strict=True))
    for temperature in ("0", "1"):
        for rows in runs:
            ranks, threads = rows[0]["ranks"], rows[0]["threads"]
            entries = [row["decoding"][temperature]["contenders"][method] for row in rows for method in titles]
            published = f"{TABLE_3[ranks]:.2f}x" if threads == 1 and temperature == "1" else ""
            table.rows.append([temperature, f"{ranks} x {threads}", *map(gain, entries), published])
    return table


def table4(load: Load) -> Table:
    """Live beams of length 4 by width, as in the paper's table of Apple's hardware."""
    table = Table("Beams of length 4", ["beam width", "speed-up", "tokens/step", "rows per step"])
    found = contenders(load("zen4/beam_shapes_live"), "0")
    for width in range(1, 5):
        entry = found[f"w{width}l4"]
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
