"""Measure step times and acceptance on a bundle, and write the budget tables of its methods.

    redraft tune --bundle artifacts/engines/NAME

How many nodes to draft depends on what a step costs, which depends on how many sequences run. Measured are
1. step times by running sequences and nodes, whole steps with drafting and host time;
2. the scores of drafted nodes at each temperature, fitted so that a score is the chance to be accepted;
3. acceptance of the largest trees: where the accepted nodes rank says what every smaller tree would have gained;
4. the chosen budgets beside no drafting. Nothing is drafted where this does not pay.

A method's table is written when the method is measured; the same command goes on with the methods that have none. With
fewer minutes than all measurements take, the most valuable are made, and what is uncertain is not drafted.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from redraft.bundle.budget import BudgetFile
from redraft.cli.options import BundleOption, ColumnOption, OwnPromptsOption, ThreadsOption
from redraft.compiler.tuning.bundle import forget_unusable, tune_bundle
from redraft.console.interrupt import interruptible
from redraft.console.progress import heartbeat, write
from redraft.errors import BundleError
from redraft.home import PROMPTS
from redraft.prompts import load_prompts
from redraft.request import InvalidRequest
from redraft.runtime import Runtime


@interruptible("redraft tune", "tables that were written are kept: the same command goes on with the other methods")
def main(
    bundle: BundleOption,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Methods of the bundle to tune. Default: those that were not tuned yet, or else all.",
            show_default=False,
        ),
    ] = None,
    prompts: OwnPromptsOption = PROMPTS,
    column: ColumnOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure acceptance on.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    minutes: Annotated[float, typer.Option(min=0, max=100_000, help="Minutes for each method, about.")] = 4.0,
    threads: ThreadsOption = None,
) -> None:
    """Write a bundle's budget tables: how many nodes to draft for each number of running sequences."""
    console = Console(stderr=True)
    try:
        known = load_prompts(prompts, column)
        write(console, f"redraft tune: loading {bundle}")
        forget_unusable(bundle, console)
        with heartbeat(lambda: "redraft tune: still loading (a clone first compiles the CPU operators)", console):
            runtime = Runtime.load(bundle, threads, prefix_reuse=False)
    except (ValueError, OSError, RuntimeError) as error:
        write(console, f"redraft tune: {error}")
        raise typer.Exit(2) from None
    if not runtime.methods:
        write(console, f"{bundle.name} has no drafter: nothing to tune")
        raise typer.Exit()
    if unknown := set(method or ()) - set(runtime.methods):
        write(
            console,
            f"redraft tune: --method: expected some of {', '.join(runtime.methods)}, got {', '.join(sorted(unknown))}",
        )
        raise typer.Exit(2)
    tuned = BudgetFile.load(bundle).methods
    names = method or [name for name in runtime.methods if name not in tuned] or list(runtime.methods)
    try:
        tune_bundle(bundle, runtime, names, known, num_prompts, max_tokens, minutes, console)
    except InvalidRequest as error:
        write(console, f"redraft tune: {prompts}: {error}")
        raise typer.Exit(2) from None
    except BundleError as error:
        write(console, f"redraft tune: {error}; tables that were written before are kept, the same command goes on")
        raise typer.Exit(1) from None
    finally:
        runtime.engine.close()
