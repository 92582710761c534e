"""Tuning of a bundle: its methods one after the other, each table written when it is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from redraft.bundle.budget import FILE_NAME, BudgetFile, doubtful_warning, doubts
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.config import BundleConfig
from redraft.chat import encode_user_turn
from redraft.compiler.tuning.measure import Bench, TreeShape
from redraft.compiler.tuning.tuner import GRID, Tuner
from redraft.console.progress import Progress, duration, progress, size, write
from redraft.console.resources import OtherLoad
from redraft.prompts import Prompt, spread
from redraft.request import InvalidRequest
from redraft.runtime import Runtime

MOST_PROMPTS = 1000
"""Prompts of a file that are looked at."""
SERVED = 32
"""Other prompts that a method which drafts from traffic has answered before it is measured."""
SERVING = 0.25
"""Most of a method's time that this takes."""


def tune_bundle(
    bundle: Path,
    runtime: Runtime,
    names: Sequence[str],
    prompts: list[Prompt],
    num_prompts: int,
    tokens: int,
    minutes: float,
    console: Console,
) -> None:
    """Measure methods of a loaded bundle on some of the prompts, `minutes` each, and write their budget tables.

    Raises InvalidRequest where no prompt fits the bundle.
    """
    turns = (prompt.turns[0] for prompt in spread(prompts, MOST_PROMPTS))
    prompts_ids = [encode_user_turn(bundle, runtime.codec, turn) for turn in turns]
    fitting = _fitting(runtime, prompts_ids, tokens, console)
    measured = spread(fitting, num_prompts)
    others = spread([ids for ids in fitting if ids not in measured], SERVED)
    alone = BundleConfig.read(bundle).tensor_parallel == 1  # other ranks' processes are no other programs
    memory = size(psutil.Process().memory_info().rss)
    limit = duration(60 * minutes * len(names))
    write(console, f"tune: {', '.join(names)}: at most about {limit}, {memory} of memory, next to no disk")
    with progress("tune", 0, "measurements", console=console) as bar:
        for name in names:
            bench, seconds, others_load = Bench(runtime, name, measured, tokens), 60 * minutes, OtherLoad()
            ends = time.monotonic() + seconds
            if runtime.methods[name].retrieves:
                bar.update(0, f"{name}: serving prompts to draft from")
                bench.ends = ends - (1 - SERVING) * seconds
                bench.serve(others)
            bar.begin(0)
            tuner = Tuner(bench, max(ends - time.monotonic(), 0), GRID, partial(_say, bar))
            table = tuner.tune()
            if alone:
                table.measured["other_load"] = round(others_load.share(), 3)
            table.measured["minutes"] = minutes
            bar.update(tuner.done)
            save(bundle, name, table)
            show(bundle, name, table, console)


def _fitting(runtime: Runtime, prompts: Sequence[list[int]], tokens: int, console: Console) -> list[list[int]]:
    """The prompts that `tokens` more fit after. Says how many are left out."""
    context = runtime.limits.max_len
    fitting = [ids for ids in prompts if len(ids) + tokens <= context]
    if not fitting:
        raise InvalidRequest(
            f"no prompt leaves room for {tokens} tokens in the bundle's context of {context}: give shorter ones"
        )
    if left_out := len(prompts) - len(fitting):
        write(console, f"tune: {left_out} of {len(prompts)} prompts do not fit the bundle's context and are left out")
    return fitting


def _say(bar: Progress, tuner: Tuner, what: str) -> None:
    bar.total, bar.deadline = tuner.of, tuner.ends
    bar.update(tuner.done, f"{tuner.bench.method}: {what}")


def forget_unusable(bundle: Path, console: Console) -> None:
    """Remove tables that no bundle would be loaded with: damaged, edited, or another build's."""
    try:
        BudgetFile.load(bundle)
    except (OSError, ValueError):
        console.print(f"{bundle / FILE_NAME} is damaged, or not of this build: measuring anew")
        (bundle / FILE_NAME).unlink(missing_ok=True)


def save(bundle: Path, method: str, table: BudgetTable) -> None:
    """Put a method's table into the bundle's file."""
    tables = BudgetFile.load(bundle)
    tables.methods[method] = table
    tables.save(bundle)


def show(bundle: Path, method: str, table: BudgetTable, console: Console) -> None:
    """Print a table with the speed-ups that it rests on, and what makes it doubtful."""
    result = Table(title=f"{method}: {TreeShape(table.construction, bool(table.ngram))}, nodes (speed-up)")
    temperatures = sorted({entry.temperature for entry in table.entries})
    for column in ("running", *(f"temperature {temperature:g}" for temperature in temperatures)):
        result.add_column(column, justify="right")
    for running in sorted({entry.running for entry in table.entries}):
        gains = table.measured["speed_up"][str(running)]
        cells = [
            f"{table.lookup(running, temperature).nodes} ({gains[f'{temperature:g}']:.2f})"
            for temperature in temperatures
        ]
        result.add_row(str(running), *cells)
    console.print(result)
    if doubts(table):
        write(console, f"tune: WARNING: {doubtful_warning(method, table, bundle)}")
