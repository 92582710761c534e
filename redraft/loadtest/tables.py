"""Tables of load test figures, for the terminal (rich) and for reports (Markdown)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from redraft.loadtest.intervals import over_runs
from redraft.loadtest.metrics import METRICS, PERCENTILES
from redraft.loadtest.results import LONG_MS, Run, by_rate, circumstances, rate_name


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

    def markdown(self) -> str:
        """The table as GitHub Markdown, title left out."""
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """A figure with thousands separators; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def milliseconds(values: Sequence[float | None], digits: int = 1) -> str:
    """`over` of a time in milliseconds, in seconds from ten seconds on."""
    known = [value for value in values if value is not None]
    if not known or max(known) < LONG_MS:
        return over(values, digits)
    return f"{over([value / 1e3 for value in known])} s"


def rates(values: Iterable[float]) -> str:
    """Shares to two places, without the zero before the point."""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def over(values: Sequence[float | None], digits: int = 1) -> str:
    """Mean of a figure over runs with half the width of its 95% interval; a dash where no run has it."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, half = over_runs(known)
    return number(mean, digits) + ("" if half is None else f" ± {number(half, digits)}")


def run_tables(runs: list[Run], percentile_metrics: list[str]) -> list[Table]:
    """The steady window's figures, where there is one, and the whole runs' with their ramps and tails."""
    tables = [_run_table(runs, "the whole run, ramp and tail included", percentile_metrics, lambda run: run.summary)]
    if any(run.summary.get("steady") for run in runs):
        part = _run_table(runs, "the steady window", percentile_metrics, lambda run: run.summary.get("steady") or {})
        tables.insert(0, part)
    return tables


def _named(text: str) -> str:
    """A further part of a title."""
    return f"; {text}" if text else ""


IN_FLIGHT = "max_concurrency_seen"


def _run_table(
    runs: list[Run], part: str, percentile_metrics: list[str], figures: Callable[[Run], dict[str, Any]]
) -> Table:
    """A column per request rate, percentiles of the chosen metrics. Counts are of all runs."""
    groups = by_rate(runs)
    table = Table(
        f"{runs[0].label}: {part}{runs[0].shortfall}{_named(circumstances(runs))}",
        ["requests/s offered", *map(rate_name, groups)],
    )
    cells = [[figures(run) for run in group] for group in groups.values()]

    def add(name: str, key: str, digits: int = 1, optional: bool = False) -> None:
        values = [[summary.get(key) for summary in cell] for cell in cells]
        if not optional or any(value is not None for group in values for value in group):
            table.rows.append([name, *(over(group, digits) for group in values)])

    for name, key, total in (
        ("Completed", "completed", sum),
        ("Errors", "errors", sum),
        ("Most in flight", IN_FLIGHT, max),
    ):
        table.rows.append([name, *(f"{total(summary.get(key, 0) for summary in cell):,}" for cell in cells)])
    add("Seconds", "duration_s", optional=True)
    add("Requests/s", "request_throughput", 2)
    add("Output tokens/s", "output_token_throughput")
    add("Goodput, requests/s", "goodput", 2, optional=True)
    add("Acceptance length", "acceptance_length", 2, optional=True)
    add("Acceptance rate", "acceptance_rate", 3, optional=True)
    add("Generator's CPU, cores", "generator_cores", 3, optional=True)
    add("Latest sending, ms", "max_send_delay_ms", optional=True)
    add("ms/token", "ms_per_token", 2)
    for key, name in METRICS.items():
        statistics = ["mean", *(f"p{p}" for p in PERCENTILES)] if key in percentile_metrics else ["mean"]
        for statistic in statistics:
            values = [[(summary.get(f"{key}_ms") or {}).get(statistic) for summary in cell] for cell in cells]
            table.rows.append([f"{name} {statistic}, ms", *map(milliseconds, values)])
    return table


COMPARED = {
    "ms_per_token": "ms/token",
    "tpot": "TPOT mean, ms",
    "ttft": "TTFT mean, ms",
    "e2el": "End-to-end mean, ms",
}
OF_SERVERS = ("server", "protocol", "plan", "client", "date", "served_before")
"""Settings in which compared runs may differ."""


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """One of COMPARED among a run's figures, None where nothing succeeded."""
    return figures[name] if name in figures else (figures[f"{name}_ms"] or {}).get("mean")


def speedup(before: float | None, after: float | None, name: str) -> float | None:
    """How many times smaller a figure is, or larger for `request_throughput`; None without one of them."""
    if not before or not after:
        return None
    return after / before if name == "request_throughput" else before / after


def common_rates(labels: list[list[Run]]) -> list[float]:
    """Request rates that every label ran, ascending.

    Raises ValueError when there is none, or when runs at a rate differ in what they sent.
    """
    rates = sorted(set.intersection(*({run.request_rate for run in runs} for runs in labels)))
    if not rates:
        raise ValueError("the compared runs share no request rate")
    sent: dict[tuple[float, int], list[Run]] = {}
    for run in (run for runs in labels for run in runs if run.request_rate in rates):
        sent.setdefault((run.request_rate, run.run), []).append(run)
    for (rate, _), (first, *rest) in sent.items():
        for run in rest:
            for key, value in first.setting.items():
                if key not in OF_SERVERS and run.setting.get(key) != value:
                    raise ValueError(
                        f"not comparable at {rate_name(rate)} requests/s: {key} is {value} in {first.label} "
                        f"and {run.setting.get(key)} in {run.label}"
                    )
    return rates


def times_faster(gains: Sequence[float | None]) -> str:
    """A speed-up with half the width of its interval."""
    mean, *half = over(gains, 2).split(" ", 1)
    return " ".join([f"{mean}x", *half])


def noise(runs: Sequence[Run], gains: Sequence[float | None]) -> str:
    """Why a gain may be none: no draft was accepted, its interval holds 1, or a single run has no interval. Empty where
    it is one."""
    if all(run.summary.get("acceptance_length") == 1.0 for run in runs):
        return ", noise: no draft was accepted"
    average, width = over_runs([gain for gain in gains if gain is not None])
    if width is None:
        return ", one run"
    return ", within noise" if abs(average - 1) <= width else ""


def speedup_table(baseline: list[Run], others: list[list[Run]], name: str = "ms_per_token") -> Table:
    """ReDrafter's Table 2: a row per model, per request rate its ms/token and its speed-up over the baseline.

    `name` chooses another of COMPARED. Runs of one number are compared with each other, as they sent the same. Raises
    ValueError as `common_rates`.
    """
    rates = common_rates([baseline, *others])
    columns = ["Model", *(f"QPS={rate_name(rate)}" for rate in rates)]
    title = f"{COMPARED[name]} (speed-up over {baseline[0].label}), by requests/s{baseline[0].shortfall}"
    title += "".join(map(_named, dict.fromkeys(map(circumstances, others))))
    table = Table(title, columns)
    reference = {(run.request_rate, run.run): figure(run.figures, name) for run in baseline}
    for runs in (baseline, *others):
        groups = by_rate(runs)
        row = [runs[0].label]
        for rate in rates:
            values = [figure(run.figures, name) for run in groups[rate]]
            gains = [speedup(reference.get((rate, run.run)), figure(run.figures, name), name) for run in groups[rate]]
            doubt = noise(groups[rate], gains) if any(gains) and runs is not baseline else ""
            row.append(milliseconds(values, 2) + (f" ({times_faster(gains)}{doubt})" if any(gains) else ""))
        table.rows.append(row)
    return table
