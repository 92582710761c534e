"""Tables of load test figures, for the terminal (rich) and for reports (Markdown)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from benchmarks.figures.results import Run, rate_name
from benchmarks.load.metrics import METRICS, PERCENTILES


@dataclass
class Table:
    """A titled grid of texts; the first column is left-aligned, the others are figures."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print title and table on the terminal, whole even where it is too narrow."""
        table = RichTable()
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
        for row in self.rows:
            table.add_row(*row)
        console.print(f"\n[bold]{self.title}", soft_wrap=True)
        natural = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        width, console.width = console.width, max(console.width, natural)
        console.print(table)
        console.width = width

    def html(self) -> str:
        """The table as HTML, title included."""
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows]
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        return f"<table>\n<caption>{escape(self.title)}</caption>\n<tr>{head}</tr>\n{body}</table>"

    def markdown(self) -> str:
        """The table as GitHub Markdown, title left out."""
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """A figure with thousands separators; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def rates(values: Iterable[float]) -> str:
    """Shares to two places, without the zero before the point."""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def run_table(runs: list[Run], percentile_metrics: list[str]) -> Table:
    """Figures of one label's runs: a column per request rate, percentiles of the chosen metrics."""
    table = Table(f"{runs[0].label}: load test", ["requests/s offered", *(rate_name(run.request_rate) for run in runs)])

    def add(name: str, key: str, digits: int = 1, optional: bool = False) -> None:
        values = [run.summary.get(key) for run in runs]
        if not optional or any(value is not None for value in values):
            table.rows.append([name, *(number(value, digits) for value in values)])

    add("Completed", "completed", 0)
    add("Errors", "errors", 0)
    add("Most in flight", "max_concurrency_seen", 0)
    add("Requests/s", "request_throughput", 2)
    add("Output tokens/s", "output_token_throughput")
    add("Goodput, requests/s", "goodput", 2, optional=True)
    add("Acceptance length", "acceptance_length", 2, optional=True)
    add("Acceptance rate", "acceptance_rate", 3, optional=True)
    add("ms/token", "ms_per_token", 2)
    for key, name in METRICS.items():
        statistics = ["mean", *(f"p{p}" for p in PERCENTILES)] if key in percentile_metrics else ["mean"]
        for statistic in statistics:
            values = [(run.summary[f"{key}_ms"] or {}).get(statistic) for run in runs]
            table.rows.append([f"{name} {statistic}, ms", *(number(value) for value in values)])
    return table


COMPARED = {"ms_per_token": "ms/token", "tpot": "TPOT mean, ms", "ttft": "TTFT mean, ms", "e2el": "End-to-end mean, ms"}


def figure(run: Run, name: str) -> float | None:
    """One of COMPARED of a run, None where nothing succeeded."""
    return run.summary[name] if name == "ms_per_token" else (run.summary[f"{name}_ms"] or {}).get("mean")


def common_rates(labels: list[list[Run]]) -> list[float]:
    """Request rates that every label ran, ascending.

    Raises ValueError when there is none, or when runs at a rate differ in what they sent.
    """
    rates = sorted(set.intersection(*({run.request_rate for run in runs} for runs in labels)))
    if not rates:
        raise ValueError("the compared runs share no request rate")
    for rate in rates:
        first, *rest = (run for runs in labels for run in runs if run.request_rate == rate)
        for run in rest:
            for key, value in first.setting.items():
                if key not in ("server", "plan") and run.setting.get(key) != value:
                    raise ValueError(
                        f"not comparable at {rate_name(rate)} requests/s: {key} is {value} in {first.label} "
                        f"and {run.setting.get(key)} in {run.label}"
                    )
    return rates


def speedup_table(baseline: list[Run], others: list[list[Run]], name: str = "ms_per_token") -> Table:
    """ReDrafter's Table 2: a row per model, per request rate its ms/token and its speed-up over the baseline.

    `name` chooses another of COMPARED. Raises ValueError as `common_rates`.
    """
    rates = common_rates([baseline, *others])
    columns = ["Model", *(f"QPS={rate_name(rate)}" for rate in rates)]
    table = Table(f"{COMPARED[name]} (speed-up over {baseline[0].label}), by requests/s", columns)
    reference = {run.request_rate: figure(run, name) for run in baseline}
    for runs in (baseline, *others):
        values = {run.request_rate: figure(run, name) for run in runs}
        row = [runs[0].label]
        for rate in rates:
            before, after = reference[rate], values[rate]
            row.append(number(after, 2) + (f" ({before / after:.2f}x)" if before and after else ""))
        table.rows.append(row)
    return table
