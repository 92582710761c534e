#!/usr/bin/env python
"""Find what a target's linear layers take, for `build_engines.py --precision fp8`.

Runs the target over prompts, in float32, and writes the largest magnitude of every linear layer's input as JSON, with
the target's fingerprint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console

from compiler.calibration import calibrate
from model_defs.target.fingerprint import target_fingerprint
from model_defs.target.model import Target
from redraft.chat import encode_user_turn
from redraft.console.interrupt import interruptible
from redraft.console.progress import progress
from redraft.prompts import read_prompts, spread
from redraft.text import TextCodec

out = Console(stderr=True, highlight=False, soft_wrap=True)


@interruptible("calibrate", "nothing was written")
def main(
    model: Annotated[Path, typer.Option(help="Target: a folder made by build/fetch_model.py.")],
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    prompts: Annotated[
        Path, typer.Option(help="Prompts of the kind that will be served: JSON, plain text lines, CSV or Parquet.")
    ] = Path("benchmarks/prompts.jsonl"),
    column: Annotated[str | None, typer.Option(help="Field or column of --prompts that holds them.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="How many of them; default: all.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are cut to so many tokens.")] = 1024,
) -> None:
    """Find what a target's linear layers take, for build_engines.py --precision fp8."""
    try:
        file = read_prompts(prompts, column)
        out.print(f"calibrate: {file}; every user turn is a text of its own", markup=False)
        turns = [turn for prompt in spread(file.prompts, num_prompts) for turn in prompt.turns]
        target = Target.from_folder(model)
        if not (model / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{model} has no tokenizer.json")
        codec = TextCodec.load(model / "tokenizer.json")
        longest = min(max_tokens, target.config.max_position)
        texts = [encode_user_turn(model, codec, turn)[:longest] for turn in turns]
        with progress("calibrate", len(texts), "texts", console=out) as shown:
            fingerprint = target_fingerprint(target)
            calibration = calibrate(target, fingerprint, texts, lambda: shown.update(shown.done + 1))
        calibration.save(output)
    except (ValueError, OSError) as error:
        out.print(f"calibrate: {error}", markup=False)
        raise typer.Exit(1) from None
    out.print(
        f"{output}: {calibration.texts} texts, {calibration.tokens} tokens, {len(calibration.largest_inputs)} layers"
    )


if __name__ == "__main__":
    typer.run(main)
