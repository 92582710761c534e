"""How soon a service is ready, and how fast its first answer is beside plain decoding.

    python -m benchmarks.load.starts --bundle BUNDLE
    python -m benchmarks.load.starts --bundle BUNDLE --model MODEL

Each start is a service of its own that has learned nothing of how much to draft. It answers one request: with what the
bundle drafts, and at the next start the same request by plain decoding. The two take turns in being first. With
`--model` that folder, which `redraft fetch` has made, is also served where nothing was built before: once with the CPU
operators to compile, and then without. Times are seconds, from the command to its end, and from the request to the end
of its answer; files have been read before. Memory is that after the answer: what of the engine's process is in it, and
of all processes of the service, where each has its share of what several use.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, PromptsFile, Report, run
from benchmarks.load.served import FirstPort, served
from redraft.home import HOME
from redraft.loadtest.clients.base import Generation
from redraft.loadtest.clients.connect import connect
from redraft.loadtest.intervals import interval, ratio
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE
from redraft.serving.processes import owned_processes
from redraft.serving.rundir import RunDir


@dataclass(frozen=True)
class Start:
    """A start of a service, and its first answer."""

    ready_s: float
    first_token_s: float
    answer_s: float
    text: str
    engine_mb: float
    service_mb: float


async def answer(port: int, generation: Generation) -> tuple[float, float, str]:
    """Seconds to the first token and to the end of an answer, and the answer. Raises typer.BadParameter for none."""
    client = await connect("http", f"127.0.0.1:{port}", None, None)
    try:
        pieces, times, started = [], [], time.perf_counter()
        async for piece in client.stream(generation):
            pieces.append(piece.text)
            times.append(time.perf_counter() - started)
    finally:
        await client.close()
    if not times:
        raise typer.BadParameter(f"no answer to {generation.text!r}")
    return times[0], times[-1], "".join(pieces)


def start(bundle: Path, port: int, generation: Generation) -> Start:
    """Serve a bundle and send it one request."""
    with tempfile.TemporaryDirectory() as folder:
        what = "--bundle", bundle, "--learned-dir", Path(folder) / "learned"
        run_dir = RunDir(Path(folder) / "run")
        with served(what, run_dir.path, port) as ready_s:
            return Start(ready_s, *asyncio.run(answer(port, generation)), *memory_mb(run_dir))


def memory_mb(run_dir: RunDir) -> tuple[float, float]:
    """Resident megabytes of the engine's process, and of all processes of its service."""
    state = run_dir.read_state()
    assert state
    shares = [process.memory_full_info().pss for process in owned_processes(run_dir.path)]
    return psutil.Process(state.worker_pid).memory_info().rss / 1e6, sum(shares) / 1e6


def unbuilt(model: Path, port: int) -> Iterator[float]:
    """Seconds until a model is served that was never built: with operators to compile, then without."""
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as home:
        env = os.environ | {"REDRAFT_HOME": home, "REDRAFT_PLUGIN_CACHE": str(Path(home) / "plugins")}
        copy = Path(home) / "models" / model.name
        shutil.copytree(model, copy)
        for _ in range(2):
            with served([copy], Path(home) / "run", port, env) as ready_s:
                yield ready_s
            shutil.rmtree(Path(home) / "engines")


def report(drafted: list[Start], plain: list[Start], unbuilt_s: list[float]) -> dict[str, Any]:
    """Figures of all starts."""
    ready = [each.ready_s for each in (*drafted, *plain)]
    result: dict[str, Any] = {"ready_s": median(ready), "ready_s_range": [min(ready), max(ready)]}
    result |= {name: median(getattr(each, name) for each in drafted) for name in ("engine_mb", "service_mb")}
    for name in ("first_token_s", "answer_s"):
        ours, theirs = (np.array([getattr(each, name) for each in starts]) for starts in (drafted, plain))
        speed_up = float(theirs.sum() / ours.sum())
        result[name] = {
            "drafted": median(ours.tolist()),
            "plain": median(theirs.tolist()),
            "speed_up": speed_up,
            "interval": interval(ratio(theirs, ours)),
            "slowest": float((theirs / ours).min()),
            "each": [
                [round(seconds, 3) for seconds in pair] for pair in zip(ours.tolist(), theirs.tolist(), strict=True)
            ],
        }
    result["identical"] = [each.text for each in drafted] == [each.text for each in plain]
    if unbuilt_s:
        result |= dict(zip(("unbuilt_with_operators_s", "unbuilt_s"), unbuilt_s, strict=True))
    return result


def table(figures: dict[str, Any]) -> Table:
    """A figure a row."""
    result = Table("A service's start", ["", "seconds", "plain decoding", "speed-up", "slowest"])
    low, high = figures["ready_s_range"]
    result.rows.append(["ready", f"{figures['ready_s']:.1f} ({low:.1f} to {high:.1f})", "", "", ""])
    for name, key in (("first token", "first_token_s"), ("first answer", "answer_s")):
        part = figures[key]
        low, high = part["interval"]
        speed_up = f"{part['speed_up']:.2f}x ({low:.2f} to {high:.2f})"
        row = [name, f"{part['drafted']:.2f}", f"{part['plain']:.2f}", speed_up, f"{part['slowest']:.2f}x"]
        result.rows.append(row)
    for name, key in (
        ("never built, operators to compile", "unbuilt_with_operators_s"),
        ("never built", "unbuilt_s"),
    ):
        if key in figures:
            result.rows.append([name, f"{figures[key]:.1f}", "", "", ""])
    return result


def main(
    bundle: BundleFolder,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A fetched model to serve where it was never built; default: none."),
    ] = None,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: Annotated[int, typer.Option(min=1, help="First requests, each of two starts.")] = 8,
    max_tokens: MaxTokens = 128,
    port: FirstPort = 8040,
    output: Report = Path("artifacts/reports/starts.json"),
) -> None:
    tokenizer = ChatTokenizer(bundle)
    drafted: list[Start] = []
    plain: list[Start] = []
    for index, prompt in enumerate(spread(load_prompts(prompts), num_prompts)):
        text = tokenizer.chat(prompt.turns[0])
        ways = [(drafted, None), (plain, AUTO_REGRESSIVE)]
        for starts, method in ways if index % 2 else reversed(ways):
            generation = Generation(text, max_tokens, {"temperature": 0.0}, method=method, add_special_tokens=False)
            starts.append(start(bundle, port, generation))
    figures = report(drafted, plain, [*unbuilt(model, port)] if model else [])
    setting = {"bundle": bundle.name, "max_tokens": max_tokens, "starts": 2 * num_prompts}
    finish(output, setting | figures, table(figures))


if __name__ == "__main__":
    run(main)
