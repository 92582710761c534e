"""ReDrafter's tables beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from benchmarks.figures.tables import Table
from redraft.request import AUTO_REGRESSIVE
from studies.figures.contenders import (
    Load,
    accepted,
    contenders,
    gain,
    methods_table,
    more_than_first,
    served,
    speedup,
)

TABLE_2 = {0.1: 2.09, 0.5: 2.11, 1: 1.57}
"""ReDrafter, table 2: speed-up of Vicuna 7B by requests per second."""
TABLE_3 = {1: 2.19, 2: 1.82}
"""ReDrafter, table 3: speed-up of Vicuna 7B by ranks."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TABLE_5 = {
    1: (62.55, 73.32, 80.47, 88.31, 100.16, 104.51, 110.64),
    2: (117.13, 140.49, 151.54, 173.29, 198.90, 215.04, 222.83),
    4: (230.03, 269.67, 299.09, 327.81, 388.51, 396.46, 340.94),
    8: (425.14, 483.85, 555.90, 649.11, 667.52, 587.30, 433.48),
    10: (536.14, 587.85, 662.88, 715.48, 735.68, 653.10, 442.25),
    20: (903.20, 980.95, 1146.95, 1077.45, 975.14, 713.17, 465.70),
    40: (1307.65, 1343.41, 1467.04, 1373.08, 1057.20, 766.03, 483.58),
    80: (1515.40, 1636.36, 1571.89),
}
"""ReDrafter, table 5: tokens/s of all requests by batch size, at the beam widths WIDTHS that fit the GPU."""
TABLE_6 = {"with": {1: 2.35, 4: 2.73, 16: 3.09, 64: 3.58}, "without": {1: 2.21, 4: 2.48, 16: 2.87, 64: 3.30}}
"""ReDrafter, table 6: tokens per step by beam width, with and without distillation."""


def table1(load: Load) -> Table:
    """ReDrafter's comparison with EAGLE and Medusa; its drafter also draws at random, with lossless rejection."""
    return methods_table(load, ("redrafter_best_first", "redrafter", "rsd_s", "spectr", "eagle", "medusa"))


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


def figure7(load: Load) -> Table:
    """Speed-up and tokens per step of live beams by width and length."""
    found = contenders(load("zen4/beam_shapes_live"), "0")
    table = Table("Live beams, temperature 0", ["beam width", *(f"length {length}" for length in range(2, 6))])
    for width in range(1, 5):
        table.rows.append([str(width), *(gain(found[f"w{width}l{length}"]) for length in range(2, 6))])
    return table


def draws(load: Load) -> Table:
    """Beams and random draws over the same drafter at temperature 1, as wide and as long: tables 1, 3 and 2."""
    labels = {"redrafter": "beams, sampled walk", "rsd_s": "RSD-S, recursive rejection", "spectr": "SpecTr, K-SEQ"}
    found, ranks = contenders(load("zen4/beam_draws"), "1"), load("zen4/tensor_parallel")["rows"]
    rates = load("zen4/redrafter_table2")["methods"]
    columns = ["draft", "tokens/step", "more than beams", "one stream"]
    columns += [f"{row['ranks']} x {row['threads']}" for row in ranks]
    columns += [f"{row['requests_per_s']:g}/s" for row in rates["redrafter"]]
    table = Table("6 x 5 draft tokens, temperature 1", columns)
    for name, label in labels.items():
        entry = found[name]
        gains = [row["decoding"]["1"]["contenders"][name]["speedup"] for row in ranks]
        gains += [row["auto_regressive_ms_per_token"] / row["speculative_ms_per_token"] for row in rates[name]]
        cells = [accepted(entry), more_than_first(entry), speedup(entry), *(f"{gain:.2f}x" for gain in gains)]
        table.rows.append([label, *cells])
    return table


def table5(load: Load) -> Table:
    """Tokens/s by beam width and batch size, their ratio to auto-regressive decoding, and the tokens per step of each
    width at batch 1."""
    report = load("zen4/beam_widths")
    cells = {(row["method"], row["batch"]): row["tokens_per_s"] for row in report["cells"]}
    batches = sorted({batch for _, batch in cells})
    methods = [*(f"width_{width}" for width in WIDTHS), "tuned"]
    table = Table(
        "Tokens/s of all requests (of each)",
        ["batch", "auto-regressive", *(f"width {width}" for width in WIDTHS), "tuned tree"],
    )
    for batch in batches:
        base = cells[AUTO_REGRESSIVE, batch]
        rates = (cells[method, batch] for method in methods)
        texts = (f"{rate:.0f} ({rate / batch:.0f}; {rate / base:.2f}x)" for rate in rates)
        table.rows.append([str(batch), f"{base:.0f} ({base / batch:.0f})", *texts])
    lengths = {row["method"]: row["acceptance_length"] for row in report["cells"] if row["batch"] == batches[0]}
    table.rows.append(["tokens/step", "1.00", *(f"{lengths[method]:.2f}" for method in methods)])
    for batch, paper in TABLE_5.items():
        texts = (f"{rate:.0f} ({rate / batch:.0f})" for rate in paper)
        missing = ["out of memory"] * (len(WIDTHS) - len(paper))
        table.rows.append([f"paper, {batch}", "", *texts, *missing, ""])
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
