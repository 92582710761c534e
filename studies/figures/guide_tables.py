"""Tables of the guides: of what the command that measured it prints, the columns that a reader decides by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.budgets import mixes
from benchmarks.load import starts
from benchmarks.served import compare
from benchmarks.speed import precision
from benchmarks.verify import structured
from redraft.loadtest import saturation
from redraft.loadtest.tables import Table
from redraft.request import AUTO_REGRESSIVE
from studies.cache import prefix_reuse
from studies.learning import measured


def saturated(report: dict[str, Any]) -> Table:
    """Ratios of latency and throughput by load."""
    return _columns(saturation.table(report), "of saturation", "TTFT speed-up", "TPOT speed-up", "throughput")


def structured_speed(report: dict[str, Any]) -> Table:
    """What drafts bring with a grammar, and to plain text."""
    table = structured.speed_table(report)
    table.rows = [row for row in table.rows if row[0] != AUTO_REGRESSIVE]
    return _columns(table, "setting", "answers", "tokens/step", "grammar ms/step", "speed-up")


def reused(report: dict[str, Any]) -> Table:
    """Times with prefix reuse over those without."""
    return _columns(prefix_reuse.table(report), "", "ratio", "95%", "cached")


def budget_mixes(report: dict[str, Any]) -> Table:
    """Speed-ups of budgets that choose themselves, and what they fall short of the best fixed one."""
    live = ("live", "live, worst 10 s", mixes.AGAIN, f"{mixes.AGAIN}, worst 10 s", "live, regret")
    simulated = ("simulated", "simulated, worst 10 s", "simulated, regret")
    return _columns(mixes.table(report["mixes"]), "mix", *live, *simulated)


def repeated(report: dict[str, Any]) -> Table:
    """What drafts from served texts bring to conversations that repeat, or do not."""
    return compare.table(report["workloads"])


def changed_by_precision(report: dict[str, Any]) -> Table:
    """How far engines' next-token distributions are from those of float32."""
    table = precision.table([precision.Difference(**row) for row in report["rows"]])
    return _columns(table, *(name for name in table.columns if name != "tokens/step"))


def _columns(table: Table, *names: str) -> Table:
    indices = [table.columns.index(name) for name in names]
    return Table(table.title, list(names), [[row[index] for index in indices] for row in table.rows])


TABLES: Mapping[str, Callable[[dict[str, Any]], Table]] = {
    "budget_mixes": budget_mixes,
    "learning": measured.table,
    "precision": changed_by_precision,
    "precision_k": changed_by_precision,
    "precision_scales": changed_by_precision,
    "saturation": saturated,
    "served_texts": repeated,
    "starts": starts.table,
    "prefix_reuse": reused,
    "structured_speed": structured_speed,
}
"""By the names of their files in docs/results."""
