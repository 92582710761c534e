"""Tuning of a bundle: its methods one after the other, each one's scores written when they are fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from redraft.bundle.method import MethodConfig
from redraft.bundle.scores import FILE_NAME, MethodScores, ScoresFile
from redraft.chat import encode_user_turn
from redraft.compiler.tuning.measure import Bench
from redraft.console.progress import duration, progress, size, write
from redraft.prompts import Prompt, spread
from redraft.request import InvalidRequest
from redraft.runtime import Runtime

MOST_PROMPTS = 1000
"""Prompts of a file that are looked at."""
JUDGED = 8
"""Other prompts, where the file has some, on which it is seen what fitted scores add."""
JUDGING = 0.25
"""Of a method's time: after it no temperature is begun."""
TEMPERATURES = (1.0, 0.7, 0.3)
"""The most valuable first."""


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
    """Fit the scores of methods of a loaded bundle to answers to some of the prompts, `minutes` each, and write them.

    Raises InvalidRequest where no prompt fits the bundle.
    """
    turns = (prompt.turns[0] for prompt in spread(prompts, MOST_PROMPTS))
    prompts_ids = [encode_user_turn(bundle, runtime.codec, turn) for turn in turns]
    fitting = _fitting(runtime, prompts_ids, tokens, console)
    measured = spread(fitting, num_prompts)
    judged = spread([ids for ids in fitting if ids not in measured], JUDGED)
    memory = size(psutil.Process().memory_info().rss)
    limit = duration(60 * minutes * len(names))
    write(console, f"tune: {', '.join(names)}: at most about {limit}, {memory} of memory, next to no disk")
    fits_of_method = len(TEMPERATURES) + 2
    with progress("tune", fits_of_method * len(names), "fits", console=console) as bar:
        for number, name in enumerate(names):
            bench, seconds = Bench(runtime, name, measured, tokens), 60 * minutes
            bench.nodes = min(bench.nodes, runtime.limits.max_tree - 1)
            judges = bool(judged) and fits(runtime.methods[name])
            ends = time.monotonic() + (1 - JUDGING * judges) * seconds
            if runtime.methods[name].ngram:
                bar.update(number * fits_of_method, f"{name}: chances of n-grams")
                bench.ends = _share_until(ends, len(TEMPERATURES) + 1)
                bench.fit_chances()
            for index, temperature in enumerate(TEMPERATURES if fits(runtime.methods[name]) else ()):
                bar.update(number * fits_of_method + index + 1, f"{name}: temperature {temperature:g}")
                bench.ends = _share_until(ends, len(TEMPERATURES) - index)
                bench.fit(temperature)
            bench.fit_joint_odds()
            nodes = tuple(sorted(bench.scores, key=lambda scores: scores.temperature))
            scores = MethodScores(nodes=nodes, ngrams=bench.ngrams)
            save(bundle, name, scores)
            show(name, scores, console)
            if judges:
                bar.update((number + 1) * fits_of_method - 1, f"{name}: what they add")
                judge = replace(bench, prompts=judged, tokens=max(tokens // 2, 2), ends=math.inf)
                show_gains(name, gains(judge, time.monotonic() + JUDGING * seconds), console)
            bar.update((number + 1) * fits_of_method, name)


def gains(bench: Bench, ends: float) -> list[tuple[float, float, float]]:
    """By temperature: tokens per step without and with what was fitted, in trees of one size and the same texts. A
    server's running calibration cannot add that: it multiplies the chances of all nodes alike, and ranks none. After
    `ends` no temperature is begun."""
    result = []
    for temperature in (*TEMPERATURES, 0.0):
        if time.monotonic() < ends:
            before, after = bench.unfitted().tokens_per_step(temperature), bench.tokens_per_step(temperature)
            result.append((temperature, before, after))
    return result


def _share_until(ends: float, parts: int) -> float:
    """The end of the first of `parts` equal parts of the time until `ends`, by `time.monotonic`."""
    now = time.monotonic()
    return now + (ends - now) / parts


def fits(method: MethodConfig) -> bool:
    """Whether a method has scores that can be fitted: of candidates that the target's noise favours, or n-grams."""
    return method.shares_noise or method.ngram


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


def forget_unusable(bundle: Path, console: Console) -> None:
    """Remove scores that no bundle would be loaded with: damaged, edited, or another build's."""
    try:
        ScoresFile.load(bundle)
    except (OSError, ValueError):
        console.print(f"{bundle / FILE_NAME} is damaged, or not of this build: fitting anew")
        (bundle / FILE_NAME).unlink(missing_ok=True)


def save(bundle: Path, method: str, scores: MethodScores) -> None:
    """Put a method's scores into the bundle's file."""
    file = ScoresFile.load(bundle)
    file.methods[method] = scores
    file.save(bundle)


def show(method: str, scores: MethodScores, console: Console) -> None:
    """Print what was fitted."""
    result = Table(title=f"{method}: scores of drafted nodes")
    for column in ("temperature", "slope", "sharpness", "n-gram odds"):
        result.add_column(column, justify="right")
    for row in scores.nodes:
        result.add_row(*(f"{value:g}" for value in (row.temperature, row.slope, row.sharpness, row.ngram_odds)))
    console.print(result)
    chances = Table(title=f"{method}: chances of n-gram guesses")
    for column in ("tokens matched", "once", "twice", "3 times", "4 or more"):
        chances.add_column(column, justify="right")
    for length, by_times in scores.ngrams.chances.items():
        chances.add_row(str(length), *(f"{chance:g}" for chance in by_times))
    console.print(chances)


def show_gains(method: str, rows: Sequence[tuple[float, float, float]], console: Console) -> None:
    """Print what the fitted scores add."""
    if not rows:
        return
    result = Table(title=f"{method}: tokens per step on other prompts")
    for column in ("temperature", "by the defaults", "as fitted", "more"):
        result.add_column(column, justify="right")
    for temperature, before, after in rows:
        result.add_row(f"{temperature:g}", f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}")
    console.print(result)
