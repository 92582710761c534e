"""The search for the rate at which a service saturates, and speculation compared with none up to it and beyond."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from redraft.loadtest.results import Run, by_rate, circumstances
from redraft.loadtest.tables import Table, figure, milliseconds, over, speedup

FOLLOWS = 0.95
"""Completed share of the requests that were due, from which on the answers follow the rate. Completions are counted
one median latency later than the requests, so that long answers are no sign of saturation."""
PRECISION = 1.1
"""The search ends when the lowest rate that was not followed is at most so many times the highest that was"""
FURTHEST = 1024.0
"""The search goes so many times above and below the first rate"""


@dataclass(frozen=True)
class Probe:
    """What came of one rate; requests per second of the steady window."""

    rate: float
    due: float
    completed: float
    errors: int

    @property
    def follows(self) -> bool:
        """Whether the answers kept up with the requests."""
        return self.errors == 0 and self.completed >= FOLLOWS * self.due

    def __str__(self) -> str:
        errors = f", {self.errors} errors" if self.errors else ""
        return (
            f"probe at {self.rate:.3g} requests/s: {self.due:.2f} were due and {self.completed:.2f} completed per "
            f"second{errors}: {'it follows' if self.follows else 'it does not follow'}"
        )


@dataclass(frozen=True)
class Saturation:
    """Where a service saturates."""

    probes: tuple[Probe, ...]

    @property
    def followed(self) -> float:
        """The highest rate that the answers followed, requests per second; 0 where they followed none."""
        return max((probe.rate for probe in self.probes if probe.follows), default=0.0)

    @property
    def throughput(self) -> float:
        """The most requests that were completed per second at any rate."""
        return max(probe.completed for probe in self.probes)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        probes = [asdict(probe) | {"follows": probe.follows} for probe in self.probes]
        return {"followed": self.followed, "throughput": self.throughput, "probes": probes}


async def find(probe: Callable[[float], Awaitable[Probe]], first: float) -> Saturation:
    """Double or halve the rate from `first` on until it is bracketed, then narrow the bracket to PRECISION."""
    probes = [await probe(first)]
    followed, other = (first, None) if probes[0].follows else (None, first)
    while followed is None or other is None:
        rate = 2 * followed if followed is not None else (other or first) / 2
        if not first / FURTHEST <= rate <= first * FURTHEST:
            break
        probes.append(await probe(rate))
        followed, other = (rate, other) if probes[-1].follows else (followed, rate)
    while followed is not None and other is not None and other > PRECISION * followed:
        rate = (followed * other) ** 0.5
        probes.append(await probe(rate))
        followed, other = (rate, other) if probes[-1].follows else (followed, rate)
    return Saturation(tuple(probes))


COMPARED = {
    "ttft": ("TTFT, ms", "TTFT speed-up"),
    "tpot": ("TPOT, ms", "TPOT speed-up"),
    "request_throughput": ("requests/s", "throughput"),
}
"""Figures of the table: as each contender's, and as a ratio."""


def comparison(baseline: list[Run], runs: list[Run], saturation: Saturation) -> dict[str, Any]:
    """What a table of both is made of: every figure of every run, by rate."""
    groups = by_rate(baseline)
    rows = [
        {
            "requests_per_s": rate,
            "of_saturation": rate / saturation.throughput,
            "auto_regressive": [run.figures for run in groups[rate]],
            "speculative": [run.figures for run in others],
        }
        for rate, others in by_rate(runs).items()
        if len(groups.get(rate, [])) == len(others)
    ]
    return {"setting": runs[0].setting, "saturation": saturation.to_json(), "rates": rows}


def table(report: dict[str, Any]) -> Table:
    """A row per rate: figures with 95% intervals over runs, and ratios run by run; above 1 speculation is better."""
    columns = [f"{name}, {kind}" for name, _ in COMPARED.values() for kind in ("auto-regressive", "speculative")]
    ratios = [ratio for _, ratio in COMPARED.values()]
    made = Table(
        f"Speculative against auto-regressive decoding; {circumstances([Run('', 0.0, report['setting'], {})])}",
        ["of saturation", "requests/s offered", *columns, *ratios],
    )
    for row in report["rates"]:
        cells, gains = [], []
        for name in COMPARED:
            plain, ours = ([figure(run, name) for run in row[key]] for key in ("auto_regressive", "speculative"))
            unit = over if name == "request_throughput" else milliseconds
            cells += [unit(plain, 2), unit(ours, 2)]
            gains.append(over([speedup(*pair, name) for pair in zip(plain, ours, strict=True)], 2))
        made.rows.append([f"{row['of_saturation']:.2f}", f"{row['requests_per_s']:g}", *cells, *gains])
    return made
