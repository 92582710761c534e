"""The papers' tables beside ours, from docs/results/*.json: a function per table, by the name of its file on the site.

Numbers of the papers stand here, each with its source; ours are read. `Load` gives a JSON file of docs/results by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.figures.tables import Table
from benchmarks.load.comparison import AR
from benchmarks.load.fairness import Cell
from benchmarks.load.fairness import table as beside_long_prompts
from benchmarks.rsd import report as rsd_report
from benchmarks.training.training_table import percent
from redraft.request import AUTO_REGRESSIVE

Load = Callable[[str], Any]

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
LYANNA_TABLE_1 = {"full": (91, 80, 70), "no_token_info": (90, 73, 64), "no_first_token": (84, 71, 63)}
"""Lyanna, table 1: conditional acceptance of steps 1 to 3, percent."""

NAMES = {
    "best": "default: ReDrafter's drafter and n-grams, best-first",
    "redrafter_best_first": "ReDrafter's drafter, best-first tree",
    "redrafter": "ReDrafter, beam search",
    "eagle": "EAGLE-style",
    "medusa": "Medusa-style",
    "lyanna": "Lyanna",
    "lyanna_no_resampling": "Lyanna without re-sampling",
    "lyanna_alone": "Lyanna, re-sampled trees instead of new drafts",
    "rsd_s": "RSD, stochastic beam search",
    "rsd_c": "RSD, constant branching",
    "spectr": "SpecTr",
    "specinfer": "SpecInfer",
    "sps": "draft LM, chain (speculative sampling)",
    "sps_tree": "draft LM, best-first tree",
    "sps_beams": "draft LM, beams",
    "ngram_trie": "n-gram retrieval, no drafter",
    "ngram": "prompt lookup, no drafter",
}
"""Methods of benchmarks/methods/methods.toml, as tables name them."""
CONSTRUCTIONS = {
    "shared": "best-first, shared noise (default)",
    "likely": "best-first, most likely tokens",
    "rsd_s": "RSD, stochastic beam search",
    "rsd_c": "RSD, constant branching",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "random_chain": "speculative sampling",
}
"""Methods of benchmarks/methods/constructions.toml, as tables name them."""
OTHER_TEXT = {"rsd_s", "rsd_c", "spectr", "specinfer", "sps"}
"""Methods whose sampled text has the target's distribution but is not auto-regressive decoding's."""


def gain(entry: Mapping[str, Any]) -> str:
    """Speed-up and tokens per step of a contender."""
    return f"{entry['speedup']:.2f}x, {entry['acceptance_length']:.2f}"


def speedup(entry: Mapping[str, Any]) -> str:
    """Speed-up of a contender, with its interval over prompts where the report has one."""
    interval = entry.get("speedup_interval")
    return f"{entry['speedup']:.2f}x" + (" ({:.2f} to {:.2f})".format(*interval) if interval else "")


def accepted(entry: Mapping[str, Any]) -> str:
    """Tokens per step of a contender with their interval over prompts."""
    return f"{entry['acceptance_length']:.2f} ({{:.2f}} to {{:.2f}})".format(*entry["acceptance_interval"])


def more_than_first(entry: Mapping[str, Any], digits: int = 2) -> str:
    """The interval of how many more tokens per step a contender accepts than the first; empty for the first."""
    low, high = entry["acceptance_below_first_interval"]
    return f"{0 - high:+.{digits}f} to {0 - low:+.{digits}f}" if low < high else ""


def contenders(report: Mapping[str, Any], temperature: str) -> dict[str, dict[str, Any]]:
    """Figures by contender of a report of benchmarks.speed.single_stream."""
    return report["single"][temperature]["contenders"]


def methods_table(load: Load, methods: Iterable[str]) -> Table:
    """Rows of methods; speed-up and tokens per step on two machines, and with drafters of equal data."""
    reports = {"Xeon": load("methods"), "Zen 4": load("zen4/methods"), "equal data": load("methods_equal")}
    columns = [f"{name}, T = {t}" for name in reports for t in ("0", "1")]
    table = Table("Speed-up and tokens per step", ["method", *columns, "sampled text"])
    for method in methods:
        cells = [gain(contenders(report, t)[method]) for report in reports.values() for t in ("0", "1")]
        table.rows.append([NAMES[method], *cells, "another" if method in OTHER_TEXT else "same"])
    return table


def redrafter_table1(load: Load) -> Table:
    """ReDrafter's comparison with EAGLE and Medusa; its drafter also draws at random, with lossless rejection."""
    return methods_table(load, ("redrafter_best_first", "redrafter", "rsd_s", "spectr", "eagle", "medusa"))


def all_methods(load: Load) -> Table:
    """Every method of the comparison."""
    return methods_table(load, NAMES)


def single_stream(load: Load) -> Table:
    """The default against auto-regressive decoding, by machine."""
    machines = {
        "Xeon with AMX": "single_stream",
        "Zen 5": "zen5/single_stream",
        "Zen 4": "zen4/single_stream",
        "Ice Lake": "icelake/single_stream",
        "Zen 3": "zen3/single_stream",
    }
    columns = [
        "machine",
        "temperature",
        "auto-regressive, tokens/s",
        "speculative",
        "speed-up",
        "tokens/step",
        "same answers",
    ]
    table = Table("One stream, 80 MT-bench prompts", columns)
    for machine, name in machines.items():
        for temperature, single in load(name)["single"].items():
            base, ours = (
                next(entry for key, entry in single["contenders"].items() if (key == AR) is plain)
                for plain in (True, False)
            )
            rates = (f"{entry['tokens_per_s']:.0f}" for entry in (base, ours))
            same = f"{ours['identical_answers']} of {single['prompts']}"
            table.rows.append([machine, temperature, *rates, speedup(ours), f"{ours['acceptance_length']:.2f}", same])
    return table


def load_test(load: Load) -> Table:
    """The default through Triton at fixed request rates."""
    return _served(load("load_test"), {})


def fairness(load: Load) -> Table:
    """What long prompts cost their neighbours, by the worker and the clients that send them."""
    cells = ({name: value for name, value in cell.items() if name != "slow_down"} for cell in load("fairness")["cells"])
    return beside_long_prompts([Cell(**cell) for cell in cells])


def redrafter_table2(load: Load) -> Table:
    """ReDrafter's beams through Triton at fixed request rates."""
    return _served(load("redrafter_table2"), TABLE_2)


def _served(report: Mapping[str, Any], published: Mapping[float, float]) -> Table:
    columns = ["requests/s", "auto-regressive, ms/token", "speculative, ms/token", "speed-up"]
    table = Table("Through Triton", [*columns, *(["the paper's, Vicuna 7B"] if published else [])])
    for row in report["rates"]:
        base, ours = row["auto_regressive_ms_per_token"], row["speculative_ms_per_token"]
        cells = [f"{row['requests_per_s']:g}", f"{base:.2f}", f"{ours:.2f}", f"{base / ours:.2f}x"]
        table.rows.append([*cells, *([f"{published[row['requests_per_s']]:.2f}x"] if published else [])])
    return table


def redrafter_table3(load: Load) -> Table:
    """Speed-up by ranks."""
    reports, titles = (
        {"AMX": load("tensor_parallel"), "no AMX": load("icelake/tensor_parallel")},
        {"redrafter": "beams", "best": "default"},
    )
    columns = [f"{titles[method]}, {machine}" for machine in reports for method in titles]
    paper = "the paper's beams, Vicuna 7B"
    table = Table("Speed-up by ranks", ["temperature", "ranks x threads", *columns, paper])
    ordered = (sorted(report, key=lambda row: (row["ranks"], row["threads"])) for report in reports.values())
    runs = list(zip(*ordered, strict=True))
    for temperature in ("0", "1"):
        for rows in runs:
            ranks, threads = rows[0]["ranks"], rows[0]["threads"]
            entries = [row["decoding"][temperature]["contenders"][method] for row in rows for method in titles]
            published = f"{TABLE_3[ranks]:.2f}x" if threads == 1 and temperature == "1" else ""
            table.rows.append([temperature, f"{ranks} x {threads}", *map(gain, entries), published])
    return table


def redrafter_table4(load: Load) -> Table:
    """Live beams of length 4 by width, as in the paper's table of Apple's hardware."""
    table = Table("Beams of length 4", ["beam width", "tokens/step", "rows per step"])
    found = contenders(load("zen4/beam_shapes_live"), "0")
    for width in range(1, 5):
        entry = found[f"w{width}l4"]
        table.rows.append([str(width), accepted(entry), f"{entry['rows_per_step']:.1f}"])
    return table


def redrafter_draws(load: Load) -> Table:
    """Tokens per step of beams and of random draws over the same drafter at temperature 1, as wide and as long."""
    labels = {"redrafter": "beams, sampled walk", "rsd_s": "RSD-S, recursive rejection", "spectr": "SpecTr, K-SEQ"}
    table = Table("6 x 5 draft tokens, temperature 1", ["draft", "tokens/step", "more than beams"])
    found = contenders(load("zen4/beam_draws"), "1")
    for name, label in labels.items():
        table.rows.append([label, accepted(found[name]), more_than_first(found[name])])
    return table


def redrafter_table5(load: Load) -> Table:
    """Tokens/s by beam width and batch size, their ratio to auto-regressive decoding, and the tokens per step of each
    width, of which wide ones were only replayed."""
    report = load("beam_widths")
    cells = {(row["method"], row["batch"]): row["tokens_per_s"] for row in report["cells"]}
    batches = sorted({batch for _, batch in cells})
    table = Table(
        "Tokens/s of all requests (of each)",
        ["batch", "auto-regressive", *(f"width {width}" for width in WIDTHS), "tuned tree"],
    )
    for batch in batches:
        base = cells[AUTO_REGRESSIVE, batch]
        rates = [cells.get((method, batch)) for method in (*(f"width_{width}" for width in WIDTHS), "tuned")]
        texts = ("-" if rate is None else f"{rate:.0f} ({rate / batch:.0f}; {rate / base:.2f}x)" for rate in rates)
        table.rows.append([str(batch), f"{base:.0f} ({base / batch:.0f})", *texts])
    (replayed,) = load("beam_shapes")["drafters"].values()
    lengths = {row["width"]: row["acceptance_length"] for row in replayed if row["length"] == 5}
    table.rows.append(["tokens/step", "1.00", *(f"{lengths[width]:.2f}" for width in WIDTHS), ""])
    for batch, paper in TABLE_5.items():
        texts = (f"{rate:.0f} ({rate / batch:.0f})" for rate in paper)
        missing = ["out of memory"] * (len(WIDTHS) - len(paper))
        table.rows.append([f"paper, {batch}", "", *texts, *missing, ""])
    return table


def redrafter_table6(load: Load) -> Table:
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


def lyanna_table1(load: Load) -> Table:
    """Conditional acceptance of the ablations, with counts."""
    labels = {"full": "full", "no_token_info": "without token info", "no_first_token": "without first token"}
    table = Table("Conditional acceptance", ["drafter", "step 1", "step 2", "step 3", "tokens/step", "the paper's"])
    results, shipped = load("ablation")["drafters"], load("zen4/ablation")["drafters"]
    rows = {label: (results[name], LYANNA_TABLE_1[name]) for name, label in labels.items()}
    rows["the shipped drafter"] = (next(iter(shipped.values())), LYANNA_TABLE_1["full"])
    for label, (row, paper) in rows.items():
        rates = zip(row["conditional"], row["accepted"], row["offered"], strict=True)
        cells = [f"{rate:.1%} ({accepted}/{offered})" for rate, accepted, offered in rates]
        length = f"{row['acceptance_length']:.2f} ±{row['interval']:.2f}"
        table.rows.append([label, *cells, length, "{}, {}, {}%".format(*paper)])
    return table


def lyanna_table2(load: Load) -> Table:
    """Mean acceptance over training, with token info of some tokens and of all."""
    report = load("zen4/token_info_table")
    runs, halves = report["runs"], report["intervals"]
    labels = {"sparse": "the 8,192 most frequent (sparse)", "dense": "all 49,152 (dense)"}
    table = Table("Mean acceptance of 3 steps", ["token info", *(f"{int(n):,} positions" for n in runs["sparse"])])
    for name, label in labels.items():
        table.rows.append([label, *(percent(value, halves[name][n]) for n, value in runs[name].items())])
    return table


def lyanna_figures8(load: Load) -> Table:
    """Tokens per step at the paper's setting."""
    table = Table("Trees 3 deep, 4 wide, 12 nodes", ["method", *(f"tokens/step, T = {t}" for t in ("0", "1"))])
    found = [contenders(load("zen4/lyanna"), t) for t in ("0", "1")]
    for name in ("lyanna", "eagle", "sps_tree", "ngram_trie"):
        table.rows.append([NAMES[name], *(accepted(entries[name]) for entries in found)])
    return table


def lyanna_fusion(load: Load) -> Table:
    """Tokens per step with re-sampling in trees of the paper, how many more than without, and accepted tokens that
    only re-sampling brought."""
    labels = {"off_12": "off", "fused_12": "fused with the new draft", "alone_12": "instead of a draft"}
    columns = [text for t in ("0", "1") for text in (f"tokens/step, T = {t}", "more than off", "re-used")]
    table = Table("Re-sampling, trees 3 deep, 4 wide, 12 nodes", ["re-sampling", *columns])
    found = [contenders(load("zen4/resampling_12"), t) for t in ("0", "1")]
    for name, label in labels.items():
        entries = [entries[name] for entries in found]
        cells = [(f"{e['acceptance_length']:.3f}", more_than_first(e, 3), str(e["reused"])) for e in entries]
        table.rows.append([label, *(text for cell in cells for text in cell)])
    return table


def lyanna_figure12(load: Load) -> Table:
    """Re-sampling instead of a new draft: speed-up with its interval, tokens per step, tokens that only it brought."""
    labels = {
        "off": "off",
        "alone_above_0": "instead of a draft, with 1 level left",
        "alone_above_1": "with 2 levels left",
        "alone_above_2": "with 3 levels left",
    }
    reports = {"Xeon": load("resampling"), "Zen 4": load("zen4/resampling")}
    columns = [f"{machine}, T = {t}" for machine in reports for t in ("0", "1")]
    table = Table("Re-sampling: speed-up, tokens per step [tokens re-used]", ["re-sampling", *columns])
    for name, label in labels.items():
        entries = [contenders(report, t)[name] for report in reports.values() for t in ("0", "1")]
        table.rows.append([label, *(f"{speedup(e)}, {e['acceptance_length']:.2f} [{e['reused']}]" for e in entries)])
    return table


def constructions(load: Load) -> Table:
    """Speed-up and tokens per step of constructions by temperature, and how much these are above those of the default,
    with the interval of the paired difference."""
    temperatures = load("constructions")["single"]
    table = Table("Speed-up and tokens per step", ["", *(f"T = {temperature}" for temperature in temperatures)])
    for name, title in CONSTRUCTIONS.items():
        cells = []
        for single in temperatures.values():
            entry = single["contenders"][name]
            more = more_than_first(entry)
            cells.append(gain(entry) + (f" ({more})" if more else ""))
        table.rows.append([title, *cells])
    return table


def rsd_experiment(load: Load, name: str) -> Table:
    """Block efficiency of each algorithm's best tree in every cell of RSD's experiment `exp1` or `exp2`."""
    return rsd_report.best_shapes(rsd_report.parts_of(load("rsd/experiments"), name))


def lossless(load: Load) -> Table:
    """What was compared with auto-regressive decoding, token by token, in fp32."""
    reports = {
        "the default, six settings, one at a time and 8 at once": "lossless",
        "every method of the comparison, six settings": "lossless-methods",
        "every drafter with every construction, greedy and temperature 1": "lossless-pairs",
    }
    table = Table("Output compared in fp32", ["what", "tokens", "differ", "near-ties"])
    for label, name in reports.items():
        rows = load(name)["settings"]
        counts = (sum(row[key] for row in rows) for key in ("tokens", "failures", "near_ties"))
        table.rows.append([label, *(f"{count:,}" for count in counts)])
    return table


TABLES: dict[str, Callable[[Load], Table]] = {
    "single_stream": single_stream,
    "load_test": load_test,
    "fairness": fairness,
    "all_methods": all_methods,
    "redrafter_table1": redrafter_table1,
    "redrafter_table2": redrafter_table2,
    "redrafter_table3": redrafter_table3,
    "redrafter_draws": redrafter_draws,
    "redrafter_table4": redrafter_table4,
    "redrafter_table5": redrafter_table5,
    "redrafter_table6": redrafter_table6,
    "lyanna_table1": lyanna_table1,
    "lyanna_table2": lyanna_table2,
    "lyanna_figures8": lyanna_figures8,
    "lyanna_fusion": lyanna_fusion,
    "lyanna_figure12": lyanna_figure12,
    "constructions": constructions,
    "rsd_experiment1": lambda load: rsd_experiment(load, "exp1"),
    "rsd_experiment2": lambda load: rsd_experiment(load, "exp2"),
    "rsd_draft_lm": lambda load: rsd_report.best_shapes(rsd_report.parts_of(load("zen4/rsd_draft_lm"), "exp1")),
    "lossless": lossless,
}
