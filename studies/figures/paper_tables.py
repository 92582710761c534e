"""Tables of docs/results.md, from docs/results/*.json: a function per table, by the name of its file on the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.load.comparison import AR
from redraft.loadtest.tables import Table
from studies.figures import lyanna_tables, redrafter_tables
from studies.figures.contenders import Load, contenders, gain, methods_table, more_than_first, served, speedup

CONSTRUCTIONS = {
    "shared": "best-first, shared noise (default)",
    "likely": "best-first, most likely tokens",
    "rsd_s": "RSD, stochastic beam search",
    "rsd_c": "RSD, constant branching",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "random_chain": "speculative sampling",
}
"""Methods of studies/methods/constructions.toml, as tables name them."""


COMPARED = (
    "best",
    "redrafter_best_first",
    "redrafter",
    "eagle",
    "medusa",
    "lyanna",
    "rsd_s",
    "spectr",
    "sps",
    "sps_tree",
)
"""The methods that a page shows: one of each kind of drafter and of tree. The files have all."""


def methods(load: Load) -> Table:
    """The methods of the comparison."""
    return methods_table(load, COMPARED)


def single_stream(load: Load) -> Table:
    """The default against auto-regressive decoding, by machine."""
    machines = {
        "Xeon with AMX": "single_stream",
        "Zen 5": "zen5/single_stream",
        "Zen 4": "zen4/single_stream",
        "Ice Lake": "icelake/single_stream",
        "Zen 3": "zen3/single_stream",
    }
    columns = ["machine", *(f"{what}, T = {t}" for t in ("0", "1") for what in ("speed-up", "tokens/step"))]
    table = Table("One stream, 80 MT-bench prompts", columns)
    for machine, name in machines.items():
        report = load(name)
        ours = (next(e for key, e in contenders(report, t).items() if key != AR) for t in ("0", "1"))
        figures = [cell for e in ours for cell in (speedup(e), f"{e['acceptance_length']:.2f}")]
        table.rows.append([machine, *figures])
    return table


PEERS = {
    "llama.cpp BF16": "llama.cpp, BF16",
    "llama.cpp Q8_0": "llama.cpp, Q8_0",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
    "llama.cpp Q4_0": "llama.cpp, Q4_0",
    "bf16": "redraft, bf16",
    AR: "redraft, the file's Q4_1, without drafts",
    "source": "redraft, the file's Q4_1 (default)",
}
"""Contenders of zen3/llama_cpp.json, as the table names them."""


def llama_cpp(load: Load) -> Table:
    """The default target, decoded here and by llama.cpp, and how much faster each of ours is than its fastest file."""
    singles = load("zen3/llama_cpp")["single"]
    table = Table("One stream", ["", *(f"{what}, T = {t}" for t in singles for what in ("tokens/s", "over llama.cpp"))])
    for name, title in PEERS.items():
        table.rows.append([title, *(cell for single in singles.values() for cell in _over_peer(single, name))])
    return table


def _over_peer(single: dict[str, Any], name: str) -> list[str]:
    """A contender's tokens per second, and how much faster that is than the fastest peer."""
    entry = single["contenders"][name]
    low, high = entry.get("over_peer_interval", (0, 0))
    over = f"{entry['over_peer']:.2f}x ({low:.2f} to {high:.2f})" if "over_peer" in entry else ""
    return [f"{entry['tokens_per_s']:.3g}", over]


def llama_cpp_qwen(load: Load) -> Table:
    """A model of 1.5B from its Q4_K_M file, for questions and for code edits."""
    loaded = {what: load(f"zen3/llama_cpp_qwen_{what}")["single"]["0"] for what in ("questions", "edits")}
    columns = [f"{figure}, {what}" for what in loaded for figure in ("tokens/s", "over llama.cpp")]
    table = Table("One stream", ["", *columns])
    peer = next(iter(loaded.values()))["fastest_peer"]
    titles = {
        peer: "llama.cpp",
        f"{peer} lookup 10": "llama.cpp, prompt lookup of 10 tokens",
        AR: "redraft, without drafts",
        "ngrams": "redraft, n-grams",
        "draft-lm": "redraft, the 0.5B as draft LM",
    }
    for name, title in titles.items():
        table.rows.append([title, *(cell for single in loaded.values() for cell in _over_peer(single, name))])
    return table


def load_test(load: Load) -> Table:
    """The default through Triton at fixed request rates."""
    return served(load("load_test"), {})


def _compared(figures: str, entry: Mapping[str, Any]) -> str:
    more = more_than_first(entry)
    return f"{figures} ({more})" if more else figures


def constructions(load: Load) -> Table:
    """Speed-up and tokens per step of constructions by temperature, and how much these are above those of the default,
    with the interval of the paired difference."""
    temperatures = load("constructions")["single"]
    table = Table("Speed-up and tokens per step", ["", *(f"T = {temperature}" for temperature in temperatures)])
    for name, title in CONSTRUCTIONS.items():
        entries = (single["contenders"][name] for single in temperatures.values())
        table.rows.append([title, *(_compared(gain(entry), entry) for entry in entries)])
    return table


def drafters(load: Load) -> Table:
    """The shipped drafters on answers that none was trained on: greedy chains of five tokens."""
    table = Table("Answers to MT-bench", ["drafter", "parameters", "tokens/step", "conditional acceptance, depths 1-5"])
    for row in load("held_out")["rows"]:
        rates = " ".join(f"{rate:.2f}" for rate in row["conditional_acceptance"])
        size = f"{row['parameters'] / 1e6:.1f}M"
        table.rows.append([f"`{row['drafter']}`", size, f"{row['chain_acceptance_length']:.2f}", rates])
    return table


def lossless(load: Load) -> Table:
    """The default compared with auto-regressive decoding, token by token, in fp32: one at a time and in a batch."""
    report = load("lossless")
    columns = ["setting", "prompts", "tokens", "differ", "near-ties", "tokens/step"]
    table = Table("Output compared in fp32", columns)
    for setting in dict.fromkeys(row["setting"] for row in report["settings"]):
        rows = [row for row in report["settings"] if row["setting"] == setting]
        sums = (sum(row[key] for row in rows) for key in ("tokens", "failures", "near_ties"))
        counts = (f"{count:,}" for count in (report["prompts"], *sums))
        table.rows.append([setting, *counts, " and ".join(f"{row['acceptance_length']:.2f}" for row in rows)])
    return table


TABLES: dict[str, Callable[[Load], Table]] = {
    "single_stream": single_stream,
    "llama_cpp": llama_cpp,
    "llama_cpp_qwen": llama_cpp_qwen,
    "load_test": load_test,
    "methods": methods,
    "redrafter_table2": redrafter_tables.table2,
    "redrafter_table4": redrafter_tables.table4,
    "lyanna_batches": lyanna_tables.batches,
    "lyanna_fusion": lyanna_tables.fusion,
    "constructions": constructions,
    "drafters": drafters,
    "lossless": lossless,
}
