"""Runs on disk: one JSON file per request rate and run in a result folder."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from redraft.loadtest.metrics import Timeline
from redraft.whole_file import whole_file

console = Console(highlight=False)
FULL: dict[str, Any] = {"num_prompts": 200, "seconds": 60.0, "runs": 3}
"""What a load test needs at least for figures that are worth keeping."""

LONG_MS = 10_000.0
"""Times from here on are read in seconds."""


@dataclass
class Run:
    """One run of one request rate of a load test: how it was made and what came out."""

    label: str
    request_rate: float
    setting: dict[str, Any]
    summary: dict[str, Any]
    """Figures of the whole run, and in `steady` those of its steady window, if it has one"""
    interrupted: bool = False
    run: int = 1

    @property
    def figures(self) -> dict[str, Any]:
        """The figures to compare: the steady window's where there is one, else the whole run's."""
        return self.summary.get("steady") or self.summary

    @property
    def shortfall(self) -> str:
        """How the run is smaller than FULL; empty if it is not."""
        few = [
            f"{self.setting[key]:g} of {FULL[key]:g} {name}" for key, name in _NAMES.items() if self._falls_short(key)
        ]
        return f" (short: {', '.join(few)})" if few else ""

    def _falls_short(self, key: str) -> bool:
        return self.setting.get(key, FULL[key]) < FULL[key]


_NAMES = {"num_prompts": "requests", "seconds": "s", "runs": "runs"}


def circumstances(runs: Sequence[Run]) -> str:
    """What a label's runs measured, how, where and when, as a table's title says it: the bundle, the temperature, the
    machine that sent the requests, the date, and what makes the figures less than they seem."""
    setting = runs[0].setting
    plan = setting.get("plan") or {}
    parts = [f"{plan['name']} ({plan['precision']})"] if "name" in plan else []
    parts += [f"temperature {setting['temperature']:g}"] if "temperature" in setting else []
    parts += [str(setting[key]) for key in ("client", "date") if key in setting]
    if (plan.get("plan") or {}).get("ngram"):
        if repeated := sum(run.setting.get("repeated_prompts", 0) for run in runs):
            parts.append(f"{repeated} prompts were sent before, and this method may draft from what was served")
        if setting.get("served_before"):
            parts.append("the service had answered others before, and this method may draft from what was served")
    return "; ".join(parts)


def by_rate(runs: list[Run]) -> dict[float, list[Run]]:
    """Runs by request rate, both ascending."""
    groups: dict[float, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.request_rate, run.run)):
        groups.setdefault(run.request_rate, []).append(run)
    return groups


def rate_name(rate: float) -> str:
    """Request rate as it is written in file names and tables."""
    return "inf" if math.isinf(rate) else f"{rate:g}"


LINE = 200
"""Most characters of a line of JSON, so that a record has one line."""


def as_json(content: Any, indent: int = 0) -> str:
    """JSON in which a list or an object has one line where it fits, and else a line per item."""
    text = json.dumps(content, ensure_ascii=False)
    if len(text) + indent <= LINE or not isinstance(content, dict | list):
        return text
    pad = " " * (indent + 1)
    if isinstance(content, dict):
        items = (f"{json.dumps(str(key), ensure_ascii=False)}: {as_json(content[key], indent + 1)}" for key in content)
        return "{\n" + pad + f",\n{pad}".join(items) + "\n" + pad[1:] + "}"
    return "[\n" + pad + f",\n{pad}".join(as_json(item, indent + 1) for item in content) + "\n" + pad[1:] + "]"


def write_json(path: Path, content: Any) -> None:
    """Write JSON through a temporary file, so that an interruption leaves no half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write_text(as_json(content) + "\n", encoding="utf-8")


def origin(machine: object) -> dict[str, object]:
    """Where figures come from: the machine that they were measured on, the date and the command."""
    command = shlex.join(["python", *sys.orig_argv[1:]])
    return {"machine": machine, "date": f"{date.today():%Y-%m-%d}", "command": command}


def save_report(path: Path, figures: dict[str, Any]) -> None:
    """Write a benchmark's figures with the machine that they were measured on, the date and the command."""
    # Not above: scripts for a bare GPU machine import this module to say which packages are missing there.
    from redraft.bundle.machine import machine_name

    measured = origin(machine_name())
    write_json(path, measured | figures | measured)


def finish(path: Path, figures: dict[str, Any], *tables: Any) -> None:
    """Print a benchmark's tables, write its report, and say where it is."""
    for table in tables:
        table.show(console)
    save_report(path, figures)
    console.print(f"written to {path}", markup=False)


def save_run(folder: Path, run: Run, timelines: list[Timeline]) -> Path:
    """Write `rate-R-run-N.json` with the run and its requests."""
    path = folder / f"rate-{rate_name(run.request_rate)}-run-{run.run}.json"
    content = {**vars(run), "request_rate": rate_name(run.request_rate)}
    write_json(path, {**content, "requests": [timeline.to_json() for timeline in timelines]})
    return path


def clear_runs(folder: Path) -> None:
    """Remove the runs of an earlier load test, so that a folder never mixes two."""
    for path in folder.glob("rate-*.json"):
        path.unlink()


def load_runs(folder: Path) -> list[Run]:
    """The runs of a result folder by ascending rate and run. Raises FileNotFoundError when it holds none."""
    paths = sorted(folder.glob("rate-*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no rate-*.json; expected the --output of a load test")
    runs = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("requests", None)
        runs.append(Run(**{**content, "request_rate": float(content["request_rate"])}))
    return sorted(runs, key=lambda run: (run.request_rate, run.run))
