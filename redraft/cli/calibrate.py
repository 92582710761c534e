"""Find what a target's linear layers take, for `redraft build --precision fp8`.

Runs the target over prompts, in float32, and writes the largest magnitude of every linear layer's input as JSON, with
the target's fingerprint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from redraft.chat import encode_user_turn
from redraft.cli.options import ColumnOption, ModelOption, OwnPromptsOption, check_folder
from redraft.compiler.calibration import calibrate
from redraft.console.interrupt import interruptible
from redraft.console.progress import progress
from redraft.home import DEFAULT_MODEL, PROMPTS, calibration_of
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.prompts import read_prompts, spread
from redraft.text import TextCodec

out = Console(stderr=True, highlight=False, soft_wrap=True)


@interruptible("redraft calibrate", "nothing was written")
def main(
    model: ModelOption = Path(DEFAULT_MODEL),
    output: Annotated[
        Path | None,
        typer.Option(help="The JSON file to write; default: the one under REDRAFT_HOME that redraft build takes."),
    ] = None,
    prompts: OwnPromptsOption = PROMPTS,
    column: ColumnOption = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts to run, spread evenly over the file; default: all.")
    ] = None,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt at most; longer ones are cut.")
    ] = 1024,
) -> None:
    """Find what a target's linear layers take, for redraft build --precision fp8."""
    output = output or calibration_of(model.name)
    check_folder(output.parent, "the folder of --output")
    if output.is_dir():
        raise typer.BadParameter(f"--output {output}: expected a file, not a folder")
    try:
        file = read_prompts(prompts, column)
        out.print(f"redraft calibrate: {file}; every user turn is a text of its own", markup=False)
        turns = [turn for prompt in spread(file.prompts, num_prompts) for turn in prompt.turns]
        target = Target.from_folder(model)
        if not (model / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{model} has no tokenizer.json")
        codec = TextCodec.load(model / "tokenizer.json")
        longest = min(max_prompt_tokens, target.config.max_position)
        texts = [encode_user_turn(model, codec, turn)[:longest] for turn in turns]
        with progress("calibrate", len(texts), "texts", console=out) as bar:
            fingerprint = target_fingerprint(target)
            calibration = calibrate(target, fingerprint, texts, lambda: bar.update(bar.done + 1))
        calibration.save(output)
    except (ValueError, OSError) as error:
        out.print(f"redraft calibrate: {error}", markup=False)
        raise typer.Exit(1) from None
    out.print(
        f"{output}: {calibration.texts} texts, {calibration.tokens} tokens, {len(calibration.largest_inputs)} layers"
    )
