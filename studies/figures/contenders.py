"""How reports of docs/results become cells of tables: a contender's figures, by method and by request rate.

`Load` gives a JSON file of docs/results by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redraft.loadtest.tables import Table

Load = Callable[[str], Any]

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
    "ngram": "prompt lookup, no drafter",
}
"""Methods of benchmarks/methods/methods.toml, as tables name them."""
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
    """Rows of methods; speed-up and tokens per step of the drafters that ship, and of drafters of equal data."""
    reports = {"shipped": load("methods"), "equal data": load("methods_equal")}
    columns = [f"{name}, T = {t}" for name in reports for t in ("0", "1")]
    table = Table("Speed-up and tokens per step", ["method", *columns, "sampled text"])
    for method in methods:
        cells = [gain(contenders(report, t)[method]) for report in reports.values() for t in ("0", "1")]
        table.rows.append([NAMES[method], *cells, "another" if method in OTHER_TEXT else "same"])
    return table


def served(report: Mapping[str, Any], published: Mapping[float, float]) -> Table:
    """Milliseconds per token by request rate, and a paper's speed-ups where it has any."""
    columns = ["requests/s", "auto-regressive, ms/token", "speculative, ms/token", "speed-up"]
    table = Table("Through Triton", [*columns, *(["the paper's, Vicuna 7B"] if published else [])])
    for row in report["rates"]:
        base, ours = row["auto_regressive_ms_per_token"], row["speculative_ms_per_token"]
        cells = [f"{row['requests_per_s']:g}", f"{base:.2f}", f"{ours:.2f}", f"{base / ours:.2f}x"]
        table.rows.append([*cells, *([f"{published[row['requests_per_s']]:.2f}x"] if published else [])])
    return table
