"""Lyanna's tables and figures beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from redraft.loadtest.tables import Table
from redraft.request import AUTO_REGRESSIVE
from studies.figures.contenders import NAMES, Load, contenders, more_than_first, speedup
from studies.replay.acceptance import conditional_cells
from studies.training import percent

TABLE_1 = {"full": (91, 80, 70), "no_token_info": (90, 73, 64), "no_first_token": (84, 71, 63)}
"""Lyanna, table 1: conditional acceptance of steps 1 to 3, percent."""
COMPARED = ("lyanna", "eagle", "sps_tree", "ngram_trie")
"""Methods of studies/methods/lyanna.toml."""


def table1(load: Load) -> Table:
    """Conditional acceptance of the ablations, with counts."""
    labels = {"full": "full", "no_token_info": "without token info", "no_first_token": "without first token"}
    table = Table("Conditional acceptance", ["drafter", "step 1", "step 2", "step 3", "tokens/step", "the paper's"])
    results, shipped = load("ablation")["drafters"], load("zen4/ablation")["drafters"]
    rows = {label: (results[name], TABLE_1[name]) for name, label in labels.items()}
    rows["the shipped drafter"] = (next(iter(shipped.values())), TABLE_1["full"])
    for label, (row, paper) in rows.items():
        table.rows.append([label, *conditional_cells(row), "{}, {}, {}%".format(*paper)])
    return table


def table2(load: Load) -> Table:
    """Mean acceptance over training, with token info of some tokens and of all."""
    report = load("zen4/token_info_table")
    runs, halves = report["runs"], report["intervals"]
    labels = {"sparse": "the 8,192 most frequent (sparse)", "dense": "all 49,152 (dense)"}
    table = Table("Mean acceptance of 3 steps", ["token info", *(f"{int(n):,} positions" for n in runs["sparse"])])
    for name, label in labels.items():
        table.rows.append([label, *(percent(value, halves[name][n]) for n, value in runs[name].items())])
    return table


def batches(load: Load) -> Table:
    """Tokens/s by temperature and batch size at the paper's setting, over auto-regressive decoding."""
    reports = [load(name) for name in ("lyanna_batches", "lyanna_batches_sampled")]
    sizes = sorted({row["batch"] for row in reports[0]["cells"]})
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
    """Re-sampling in trees of the paper: speed-up, tokens per step, how many more than without, and accepted tokens
    that only re-sampling brought."""
    labels = {"off_12": "off", "fused_12": "fused with the new draft", "alone_12": "instead of a draft"}
    columns = [text for t in ("0", "1") for text in (f"speed-up, T = {t}", "tokens/step", "more than off", "re-used")]
    table = Table("Re-sampling, trees 3 deep, 4 wide, 12 nodes", ["re-sampling", *columns])
    found = [contenders(load("zen4/resampling_12"), t) for t in ("0", "1")]
    for name, label in labels.items():
        row = [label]
        for entry in (entries[name] for entries in found):
            row += [
                speedup(entry),
                f"{entry['acceptance_length']:.3f}",
                more_than_first(entry, 3),
                str(entry["reused"]),
            ]
        table.rows.append(row)
    return table
