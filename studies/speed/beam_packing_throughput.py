"""Tokens per second with and without packed beams, by batch size (ReDrafter, figure 6, right).

    python -m studies.speed.beam_packing_throughput --bundle BUNDLE --concurrency 1 2 4 8 16

BUNDLE holds the methods of studies/methods/beam_packing.toml. Each `packed_W` is run as `unpacked_W` too, which
verifies the same W beams by `studies.speed.unpacked_beams`.
Without packing every beam has rows of its own, and the longest one that matches is accepted; so both accept the same
tokens in the same steps, and only the rows differ. The script ends with an error where they do not, or where an answer
is not auto-regressive decoding's. Methods take turns at greedy requests, and each cell is its best round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import PROMPTS_FILE, BundleFolder, Concurrency, MaxTokens, PromptsFile, Report, run
from benchmarks.plots import save
from benchmarks.speed.inprocess import Clock, load_llm
from benchmarks.speed.method_batches import FewPrompts, Rounds, Workload, best_rounds
from redraft.bundle.method import MethodConfig
from redraft.llm import Answer
from redraft.loadtest.plots import COLORS, new_figure
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.request import AUTO_REGRESSIVE
from studies.speed.unpacked_beams import BEAM_UNPACKED, register

PACKED, UNPACKED = "packed_", "unpacked_"


def check(method: str, answers: Sequence[Answer], pair: Sequence[Answer], plain: Sequence[Answer]) -> None:
    """Raise ArithmeticError for an answer whose tokens are not those of `plain`, auto-regressive decoding's, or whose
    steps and accepted tokens are not those of `pair`, the other method of its width."""
    for number, (answer, other, reference) in enumerate(zip(answers, pair, plain, strict=True)):
        if answer.token_ids != reference.token_ids:
            raise ArithmeticError(f"{method}, prompt {number}: other tokens than auto-regressive decoding")
        actual, wanted = ((item.stats.steps, item.stats.accepted_by_depth) for item in (answer, other))
        if actual != wanted:
            raise ArithmeticError(
                f"{method}, prompt {number}: {actual[0]} steps that accept {actual[1]} by depth; the other method of "
                f"this width has {wanted[0]} and {wanted[1]}"
            )


def pair_of(method: str) -> str:
    """The method that the acceptance of `method` is compared with."""
    return method.replace(UNPACKED, PACKED, 1)


def methods_of(method: str, methods: Mapping[str, MethodConfig]) -> dict[str, MethodConfig]:
    """The bundle's methods, or of an unpacked method, its pair's with unpacked beams."""
    if not method.startswith(UNPACKED):
        return dict(methods)
    return {pair_of(method): methods[pair_of(method)].changed(construction=BEAM_UNPACKED)}


def width_of(method: str) -> str:
    """Beams, as the method's name says."""
    return method.rpartition("_")[2]


def table(cells: Mapping[tuple[str, int], Mapping[str, Any]]) -> Table:
    """A row per method with its tokens/s at each batch size, and per width what packing gains."""
    methods, batches = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    columns = ["method", "tokens/step", "rows/step", *(f"batch {batch}" for batch in batches)]
    result = Table("Tokens/s of all requests (of each)", columns)
    for method in methods:
        first = cells[method, batches[0]]
        rates = [cells[method, batch]["tokens_per_s"] for batch in batches]
        figures = [f"{rate:.0f} ({rate / batch:.1f})" for rate, batch in zip(rates, batches, strict=True)]
        result.rows.append(
            [method, f"{first['acceptance_length']:.2f}", f"{1 + first['drafted_per_step']:.1f}", *figures]
        )
    for method in methods:
        if method.startswith(UNPACKED):
            packed, whole = (
                [cells[name, batch]["tokens_per_s"] for batch in batches] for name in (pair_of(method), method)
            )
            gains = [f"{after / before:.2f}x" for after, before in zip(packed, whole, strict=True)]
            result.rows.append([f"{pair_of(method)} / {method}", "", "", *gains])
    return result


def plot(cells: Mapping[tuple[str, int], Mapping[str, Any]], path: Path) -> Path:
    """Tokens/s of each request and of all, over the batch size; a color per width, dashed without packing."""
    methods, batches = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    widths = dict.fromkeys(width_of(method) for method in methods if method != AUTO_REGRESSIVE)
    colors = dict(zip(widths, COLORS[1:], strict=False))
    figure, axes = new_figure(2)
    for method in methods:
        width = width_of(method)
        label = f"{width} beams, {method.partition('_')[0]}" if width in colors else "auto-regressive"
        style = "--" if method.startswith(UNPACKED) else "-"
        for axis, shared in zip(axes, (True, False), strict=True):
            rates = [cells[method, batch]["tokens_per_s"] / (batch if shared else 1) for batch in batches]
            color = colors.get(width, COLORS[0])
            axis.plot(range(len(batches)), rates, f"o{style}", color=color, label=label, ms=4)
    for axis, title in zip(axes, ("Tokens/s of each request", "Tokens/s of all requests"), strict=True):
        axis.set_title(title, loc="left")
        axis.set_xlabel("batch size")
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return save(figure, path)


def main(
    bundle: BundleFolder,
    batches: Concurrency = [1, 2, 4, 8, 16],
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: FewPrompts = 48,
    max_tokens: MaxTokens = 64,
    rounds: Rounds = 2,
    output: Report = Path("artifacts/reports/beam_packing_throughput.json"),
) -> None:
    register()
    llm = load_llm(bundle)
    bundled = dict(llm.runtime.methods)
    packed = sorted(bundled, key=lambda method: width_of(method).zfill(9))
    methods = [AUTO_REGRESSIVE, *(name for method in packed for name in (method, method.replace(PACKED, UNPACKED, 1)))]
    load = Workload.load(bundle, [llm], prompts, num_prompts, batches, max_tokens, 0.0)
    first: dict[str, list[Answer]] = {}

    def answer(method: str, batch: int) -> tuple[list[Answer], Clock]:
        llm.runtime.methods = methods_of(method, bundled)
        llm.runtime.with_methods(llm.runtime.methods)
        answers, spent = load.answer(llm, pair_of(method), batch)
        first.setdefault(method, answers)
        check(method, answers, first[pair_of(method)], first[AUTO_REGRESSIVE])
        return answers, spent

    cells = best_rounds(rounds, batches, methods, answer)
    llm.close()
    setting = {"prompts": len(load.requests), "rounds": rounds, "max_tokens": max_tokens, "temperature": 0.0}
    report = {**setting, "same_tokens_and_steps": True, "cells": list(cells.values())}
    finish(output, report, table(cells))


if __name__ == "__main__":
    run(main)
