"""Plan the training of a drafter within a time, and say what it gained.

`make drafter` runs these before and after `redraft distill`, `redraft train` and `redraft tune`:

    redraft drafter plan PLAN --model MODEL --engine ENGINE --teacher TEACHER --prompts DATA --hours 1
    redraft drafter sizes PLAN
    redraft drafter gains DRAFTER --model MODEL --teacher TEACHER --prompts DATA --ngrams BUNDLE --bundle BUNDLE

A plan is stored and kept: after a kill, the same command goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from redraft.console.interrupt import interruptible
from redraft.console.progress import write
from redraft.errors import BundleError
from redraft.home import PROMPTS
from redraft.prompts import Prompt, load_prompts
from redraft.training.gains import fitting_prompts, measure_gains, shipped_curves, summary, unseen_prompts
from redraft.training.plan import Plan, plan_training
from redraft.training.teacher_data import cutoff_of_shards

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(stderr=True)


PromptsOption = Annotated[Path | None, typer.Option(help="The teacher's prompts; default: those of the benchmarks.")]
TeacherOption = Annotated[Path, typer.Option(help="Folder of the teacher data: redraft distill --output.")]
ColumnOption = Annotated[str | None, typer.Option(help="The column that holds them.")]


def read(prompts: Path | None, column: str | None) -> list[Prompt]:
    return load_prompts(prompts or PROMPTS, column)


def say(text: str) -> None:
    write(console, f"redraft drafter: {text}")


@contextmanager
def ended_in_a_line() -> Iterator[None]:
    """End the process with one line where an input is wrong."""
    try:
        yield
    except (OSError, ValueError, BundleError) as error:
        say(str(error))
        raise typer.Exit(2) from None


@app.command()
@interruptible("redraft drafter", "the same command goes on")
@ended_in_a_line()
def plan(
    path: Annotated[Path, typer.Argument(help="File of the plan.")],
    model: Annotated[Path, typer.Option(help="Target folder written by redraft fetch.")],
    engine: Annotated[Path, typer.Option(help="Its engine bundle that writes teacher data.")],
    teacher: TeacherOption,
    prompts: PromptsOption = None,
    column: ColumnOption = None,
    hours: Annotated[float, typer.Option(min=0, max=10_000, help="Time for teacher data and training together.")] = 1.0,
) -> None:
    """Size teacher data and training by rates measured now, unless that was done for as many hours."""
    found = plan_training(path, model, engine, teacher, read(prompts, column), hours, say)
    for line in found.lines():
        say(line)


@app.command()
def sizes(path: Annotated[Path, typer.Argument(help="File of the plan.")]) -> None:
    """Print a plan as variables for make."""
    if found := Plan.read(path):
        print(f"TOKENS={found.tokens} POSITIONS={found.positions}")


@app.command()
@interruptible("redraft drafter", "the same command goes on")
@ended_in_a_line()
def gains(
    drafter: Annotated[Path, typer.Argument(help="The trained drafter's folder, where gains.json is written.")],
    model: Annotated[Path, typer.Option(help="Its target's folder.")],
    teacher: TeacherOption,
    ngrams: Annotated[Path, typer.Option(help="Tuned bundle without a drafter.")],
    bundle: Annotated[Path, typer.Option(help="Tuned bundle with the drafter.")],
    prompts: PromptsOption = None,
    column: ColumnOption = None,
) -> None:
    """Measure what the drafter gains on prompts that it was not trained on, and estimate what twice the hours would."""
    given = read(prompts, column) if prompts else []
    asked = unseen_prompts(given, cutoff_of_shards(teacher), load_prompts(PROMPTS))
    found = measure_gains(drafter, ngrams, bundle, fitting_prompts(model, (ngrams, bundle), asked))
    for line in summary(found, shipped_curves()):
        print(line)
