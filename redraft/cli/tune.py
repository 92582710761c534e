"""Fit the scores of drafted nodes to a bundle's own model.

    redraft tune --bundle artifacts/engines/NAME

A server needs no tuning: how much it drafts follows from what it sees. The scores that ship were fitted to one small
model. Scores of the bundle's own rank nodes better where requests are sampled: three numbers for each temperature,
fitted to answers so that a score is the log of the chance to be accepted. How often n-gram guesses are right is counted
in greedy answers, and how they join with a drafter's scores is fitted too.

At the end it says what the scores add: tokens per step with and without them, on other prompts. A running server's
estimate cannot add that.

A method's scores are written when they are fitted; the same command goes on with the methods that have none.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from redraft.bundle.scores import ScoresFile
from redraft.cli.options import BundleOption, ColumnOption, OwnPromptsOption, ThreadsOption
from redraft.compiler.tuning.bundle import forget_unusable, tune_bundle
from redraft.console.interrupt import interruptible
from redraft.console.progress import heartbeat, write
from redraft.errors import BundleError
from redraft.home import PROMPTS
from redraft.prompts import load_prompts
from redraft.request import InvalidRequest
from redraft.runtime import Runtime


@interruptible("redraft tune", "scores that were written are kept: the same command goes on with the other methods")
def main(
    bundle: BundleOption,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Methods of the bundle to tune. Default: those that were not fitted yet, or else all.",
            show_default=False,
        ),
    ] = None,
    prompts: OwnPromptsOption = PROMPTS,
    column: ColumnOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to fit to.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    minutes: Annotated[float, typer.Option(min=0, max=100_000, help="Minutes for each method, about.")] = 4.0,
    threads: ThreadsOption = None,
) -> None:
    """Fit the scores of a bundle's drafted nodes to its own answers."""
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
    fitted = ScoresFile.load(bundle).methods
    names = method or [name for name in runtime.methods if name not in fitted] or list(runtime.methods)
    try:
        tune_bundle(bundle, runtime, names, known, num_prompts, max_tokens, minutes, console)
    except InvalidRequest as error:
        write(console, f"redraft tune: {prompts}: {error}")
        raise typer.Exit(2) from None
    except BundleError as error:
        write(console, f"redraft tune: {error}; scores that were written before are kept, the same command goes on")
        raise typer.Exit(1) from None
    finally:
        runtime.engine.close()
