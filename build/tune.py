"""Measure step times and acceptance on a bundle, and write the budget tables of its methods.

    python build/tune.py --bundle artifacts/engines/NAME --prompts benchmarks/prompts.jsonl

How many nodes to draft depends on what a step costs, which depends on how many sequences run. Three measurements:
1. acceptance: each tree shape drafts its largest tree once; where the accepted nodes rank in it says what every
   smaller tree would have gained, and where they rank among all nodes what a share of a batch's rows would have. A
   method that does not have the default shape keeps its own; random trees are cut in draw order, so each of their
   budgets is measured by itself;
2. step times t(running, budget), whole steps with drafting and host time, interleaved so that a busy moment of the
   machine hits all budgets alike;
3. the budget with the most tokens per second for each number of running sequences; 0 (no drafting) unless drafting
   gains at least `MARGIN`.

A method that drafts from what was served answers other prompts of the file before it is measured.

A method's table is written when the method is measured. The same command goes on with the methods that have none; of
the method under way nothing is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from acceptance import Acceptance, CutAcceptance
from redraft.bundle.budget import FILE_NAME, BudgetEntry, BudgetFile, BudgetTable
from redraft.chat import render_chat
from redraft.console.interrupt import interruptible
from redraft.console.progress import duration, progress, size, write
from redraft.method import MethodPlan
from redraft.prompts import load_prompts, spread
from redraft.request import GenerateRequest, InvalidRequest
from redraft.runtime import Runtime
from redraft.scheduler import Scheduler

MARGIN = 0.15
"""Prefill, which drafts do not speed up, and harder prompts than the tuner's leave less of a gain than it expects."""
BUDGETS = (0, 1, 2, 3, 4, 6, 8, 11, 15, 19, 23, 31, 47, 63)
"""With the root mostly a multiple of 4 rows, which the CPU operators take at a time; those that --max-tree allows."""
RUNNING = (1, 2, 3, 4, 6, 8, 16, 32)
SHAPES = (("beam", False), ("beam", True), ("best_first", False), ("best_first", True))
"""Construction and n-gram branch that a method of the last, which is the default, is tried with; any other method keeps
its own. Step times are those of the last, whose trees fill every budget."""
SAMPLED = {"temperature": 1.0, "seed": 1}
ROUNDS = 4
SERVED = 32
"""Other prompts of the file that a method has answered before which drafts from what was served."""
STEP_ROWS = 24
"""What a step costs beside its rows, in rows: for the estimate of the time only."""

Say = Callable[[int, str], None]
"""Takes the rows computed since the last call, as they were estimated, and what is under way."""
Shape = tuple[str | None, bool]
"""Construction and n-gram branch."""


def answer_rows(prompts: int, tokens: int, budget: int, slots: int) -> int:
    """Estimated rows of so many answers: two tokens a step where there are drafts."""
    steps = prompts * tokens / (2 if budget else 1)
    return round(steps * (1 + budget + STEP_ROWS / max(min(slots, prompts), 1)))


def timed_rows(running: int, budget: int) -> int:
    """Rows of a measurement of the step time, which takes two steps."""
    return 2 * (STEP_ROWS + running * (1 + budget))


@dataclass(frozen=True)
class Measurements:
    """What a method is measured with: tree shapes, numbers of running sequences, budgets, the largest tree, and the
    prompts that are served before."""

    shapes: list[Shape]
    counts: list[int]
    budgets: list[int]
    largest: int
    served: Sequence[str]
    random: bool

    @classmethod
    def of(cls, runtime: Runtime, method: str, others: Sequence[str] = ()) -> Measurements:
        """What a bundle's method is measured with; one that drafts from what was served answers the `others` before."""
        plan, slots = runtime.plans[method], runtime.limits.slots
        own = (plan.construction, plan.ngram)
        budgets = [budget for budget in BUDGETS if budget < runtime.limits.max_tree]
        if plan.shape is not None and not plan.ngram:
            draws = sum(plan.shape.widths)
            budgets = [budget for budget in budgets if budget < draws] + [draws]
        return cls(
            shapes=list(SHAPES) if own == SHAPES[-1] else [own],
            counts=sorted({count for count in RUNNING if count < slots} | {slots}),
            budgets=budgets,
            largest=min(runtime.limits.max_tree - 1, BUDGETS[-1]),
            served=others if plan.retrieves else (),
            random=plan.shape is not None,
        )

    def rows(self, prompts: int, tokens: int, slots: int) -> int:
        """Estimated rows of all measurements."""
        drawn = [budget for budget in self.budgets if budget] if self.random else [self.largest]
        answers = sum(answer_rows(prompts, tokens, budget, slots) for budget in drawn)
        serving = answer_rows(len(self.served), tokens, 1, slots)
        steps = ROUNDS * sum(timed_rows(count, budget) for count in self.counts for budget in self.budgets)
        return 2 * len(self.shapes) * (answers + serving) + serving + steps


def measure_cuts(runtime: Runtime, method: str, shape: Shape, prompts: list[str], tokens: int,
                 sampling: dict, budgets: list[int], say: Say) -> CutAcceptance:  # fmt: skip
    """Generate `tokens` after each prompt with trees of each budget."""
    return CutAcceptance(
        {
            budget: measure_acceptance(runtime, method, shape, prompts, tokens, sampling, say, budget)
            if budget
            else Acceptance()
            for budget in budgets
        }
    )


def measure_acceptance(runtime: Runtime, method: str, shape: Shape, prompts: list[str],
                       tokens: int, sampling: dict, say: Say, budget: int = BUDGETS[-1],
                       served: Sequence[str] = ()) -> Acceptance:  # fmt: skip
    """Generate `tokens` after each prompt with trees of one shape, of `budget` nodes; the `served` prompts come first
    and do not count."""
    largest = min(runtime.limits.max_tree - 1, budget)
    found = Acceptance()
    runtime.with_plans(plan_of(runtime, method, shape, BudgetTable.constant(largest)), found.observe)
    _answer(runtime, served, tokens, sampling, 1, say, "serving prompts to draft from")
    found.steps.clear()
    _answer(runtime, prompts, tokens, sampling, largest, say, f"{method}: acceptance of {shape_name(shape)}")
    return found


def measure_steps(runtime: Runtime, method: str, shape: Shape, prompts: list[str],
                  budgets: list[int], counts: list[int], say: Say, served: Sequence[str] = (),
                  tokens: int = 1, rounds: int | None = None) -> dict[int, dict[int, float]]:  # fmt: skip
    """Median wall time of a whole step, seconds, for each number of running sequences and budget, after `tokens` have
    been generated for each of the `served` prompts."""
    table = BudgetTable.constant(0)
    runtime.with_plans(plan_of(runtime, method, shape, table))
    _answer(runtime, served, tokens, {}, 1, say, "serving prompts to draft from")
    scheduler = runtime.scheduler
    times: dict[int, dict[int, float]] = {}
    joined = 0
    for count in counts:
        samples: dict[int, list[float]] = defaultdict(list)
        for _ in range(rounds or ROUNDS):
            for budget in budgets:
                table.entries[0].greedy = budget
                while _load(scheduler) < count:
                    _join(runtime, prompts[joined % len(prompts)], joined)
                    joined += 1
                _settle(scheduler)
                _timed_step(scheduler)
                samples[budget].append(_timed_step(scheduler))
                say(timed_rows(count, budget), f"{method}: step times, {count} running, {budget} drafted")
        times[count] = {budget: float(np.median(values)) for budget, values in samples.items()}
    for place in range(joined):
        scheduler.cancel(f"s{place}")
    scheduler.step()
    return times


def plan_of(runtime: Runtime, method: str, shape: Shape, budget: BudgetTable) -> dict[str, MethodPlan]:
    """One method's plan with another tree shape and budget, as the only one."""
    return {method: replace(runtime.plans[method], construction=shape[0], ngram=shape[1], budget=budget)}


def _answer(
    runtime: Runtime, prompts: Sequence[str], tokens: int, sampling: dict, budget: int, say: Say, note: str
) -> None:
    """Generate `tokens` after each prompt, as many at a time as there are slots."""
    if not prompts:
        return
    waiting = [(f"p{place}", prompt) for place, prompt in enumerate(prompts)]
    rows, said = answer_rows(len(prompts), tokens, budget, runtime.limits.slots), 0
    totals = runtime.scheduler.totals
    before = totals.output_tokens
    while waiting or not runtime.scheduler.idle:
        while waiting and _load(runtime.scheduler) < runtime.limits.slots:
            name, prompt = waiting.pop()
            request = GenerateRequest(id=name, text=prompt, max_tokens=tokens, sampling=sampling)  # type: ignore[arg-type]
            runtime.scheduler.submit(runtime.sequence(name, request))
        runtime.scheduler.step()
        done = int(rows * (totals.output_tokens - before) / (len(prompts) * tokens))
        say(done - said, note)
        said = done
    say(rows - said, note)


def _join(runtime: Runtime, prompt: str, place: int) -> None:
    ids = runtime.codec.encode(prompt)[: runtime.limits.max_len // 2]
    request = GenerateRequest(
        id=f"s{place}", input_ids=ids, max_tokens=runtime.limits.max_len - len(ids) - 1, end_id=-1
    )
    runtime.scheduler.submit(runtime.sequence(request.id, request))


def _load(scheduler: Scheduler) -> int:
    status = scheduler.status()
    return status.running + status.waiting


def _settle(scheduler: Scheduler) -> None:
    """Step until every running sequence decodes."""
    while scheduler.prefilling:
        scheduler.step()


def _timed_step(scheduler: Scheduler) -> float:
    before = scheduler.totals.step_s
    scheduler.step()
    return scheduler.totals.step_s - before


def choose(
    times: dict[int, dict[int, float]], greedy: Acceptance | CutAcceptance, sampled: Acceptance | CutAcceptance
) -> tuple[list[BudgetEntry], dict[str, dict[str, float]]]:
    """The best budgets, never growing with load, and the speed-up over no drafting that each should bring."""
    entries, gains = [], {}
    largest = max(max(by_budget) for by_budget in times.values())
    most = {"greedy": largest, "sampled": largest}
    for count, by_budget in sorted(times.items()):
        best, gain = {}, {}
        for mode, acceptance in (("greedy", greedy), ("sampled", sampled)):
            speed = {n: acceptance.length(n, count) / t * by_budget[0] for n, t in by_budget.items() if n <= most[mode]}
            budget = max(speed, key=lambda n, speed=speed: speed[n])  # type: ignore[misc]
            most[mode] = best[mode] = budget if speed[budget] >= 1 + MARGIN else 0
            gain[mode] = speed[best[mode]] if best[mode] else 1.0
        entries.append(BudgetEntry(running=count, **best))
        gains[str(count)] = gain
    return entries, gains


def tune(
    runtime: Runtime, method: str, prompts: list[str], tokens: int, say: Say, others: Sequence[str] = ()
) -> BudgetTable:
    """Measure a runtime's method and return its budget table. The runtime must be idle. A method that drafts from what
    was served has answered the `others` before."""
    found = Measurements.of(runtime, method, others)
    shapes, budgets = found.shapes, found.budgets
    accepted: dict[Shape, list[Acceptance | CutAcceptance]] = {
        shape: [
            measure_cuts(runtime, method, shape, prompts, tokens, sampling, budgets, say)
            if found.random
            else measure_acceptance(runtime, method, shape, prompts, tokens, sampling, say, found.largest, found.served)
            for sampling in ({}, SAMPLED)
        ]
        for shape in shapes
    }
    best: tuple[float, BudgetTable] | None = None
    times = measure_steps(runtime, method, shapes[-1], prompts, budgets, found.counts, say, found.served, tokens)
    step_ms = {str(r): {str(n): round(1e3 * t, 3) for n, t in row.items()} for r, row in times.items()}
    for shape in shapes:
        entries, gains = choose(times, *accepted[shape])
        score = float(np.mean([np.log(gain) for by_mode in gains.values() for gain in by_mode.values()]))
        measured = {
            "step_ms": step_ms,
            "acceptance": {
                shape_name(other): {
                    mode: {str(n): round(lengths.length(n), 3) for n in budgets}
                    for mode, lengths in zip(("greedy", "sampled"), both, strict=True)
                }
                for other, both in accepted.items()
            },
            "speed_up": gains,
        }
        table = BudgetTable(entries=entries, construction=shape[0], ngram=shape[1], measured=measured)
        if best is None or score > best[0]:
            best = score, table
    assert best is not None
    return best[1]


def shape_name(shape: Shape) -> str:
    """A tree shape in words."""
    return " + ".join([*([shape[0]] if shape[0] else []), *(["n-gram"] if shape[1] else [])])


def show(method: str, table: BudgetTable, console: Console) -> None:
    """Print the table with the speed-ups that it rests on."""
    shown = Table(title=f"{method}: {shape_name((table.construction, bool(table.ngram)))}")
    for column in ("running", "budget, greedy", "speed-up", "budget, sampled", "speed-up"):
        shown.add_column(column, justify="right")
    for entry in table.entries:
        gain = table.measured["speed_up"][str(entry.running)]
        shown.add_row(str(entry.running), str(entry.greedy), f"{gain['greedy']:.2f}", str(entry.sampled),
                      f"{gain['sampled']:.2f}")  # fmt: skip
    console.print(shown)


@interruptible("tune", "tables that were written are kept: the same command goes on with the other methods")
def main(
    bundle: Annotated[Path, typer.Option(help="Folder of the engine bundle to tune.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns` or `prompt`.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method to tune; may be given several times. Default: those without a table, else all."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure acceptance on.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine; default: all cores.")] = None,
) -> None:
    """Write a bundle's budget tables: how many nodes to draft for each number of running sequences."""
    console = Console(stderr=True)
    try:
        write(console, f"tune: loading {bundle}")
        forget_unusable(bundle, console)
        runtime = Runtime.load(bundle, threads)
        known = load_prompts(prompts)
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"tune: {error}")
        raise typer.Exit(2) from None
    if not runtime.plans:
        console.print(f"{bundle.name} has no drafter: nothing to tune")
        raise typer.Exit()
    if unknown := set(method or ()) - set(runtime.plans):
        console.print(f"tune: --method: expected some of {', '.join(runtime.plans)}, got {', '.join(sorted(unknown))}")
        raise typer.Exit(2)
    chosen = spread(known, num_prompts)
    others = spread([prompt for prompt in known if prompt not in chosen], SERVED)
    texts, other_texts = ([render_chat(bundle, prompt.turns[0]) for prompt in some] for some in (chosen, others))
    tuned = BudgetFile.load(bundle).methods
    names = method or [name for name in runtime.plans if name not in tuned] or list(runtime.plans)
    slots = runtime.limits.slots
    total = sum(Measurements.of(runtime, name, other_texts).rows(len(texts), tokens, slots) for name in names)
    try:
        with progress("tune", total, "rows", "timing a step", console) as shown:
            say_plan(runtime, names, texts, total, console)
            shown.begin(0)
            for name in names:
                table = tune(runtime, name, texts, tokens, lambda rows, note: shown.update(shown.done + rows, note),
                             other_texts)  # fmt: skip
                save(bundle, name, table)
                show(name, table, console)
    except InvalidRequest as error:
        console.print(f"tune: {prompts}: {error}")
        raise typer.Exit(2) from None
    finally:
        runtime.engine.close()


def say_plan(runtime: Runtime, names: list[str], prompts: list[str], rows: int, console: Console) -> None:
    """What tuning takes, by the time of a step with every slot in use."""
    budget, slots = Measurements.of(runtime, names[0]).budgets[-1], runtime.limits.slots
    shape = runtime.plans[names[0]].construction, runtime.plans[names[0]].ngram
    times = measure_steps(runtime, names[0], shape, prompts, [budget], [slots], lambda *_: None, rounds=1)
    seconds = rows * times[slots][budget] / (timed_rows(slots, budget) / 2)
    memory = size(psutil.Process().memory_info().rss)
    write(console, f"tune: {', '.join(names)}: about {duration(seconds)}, {memory} of memory, next to no disk")


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


if __name__ == "__main__":
    typer.run(main)
