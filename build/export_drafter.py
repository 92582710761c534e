"""Export a drafter of kind eagle3 to a form that other servers load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.markup import escape

from compiler.checkpoints.eagle3 import Form, export_eagle3
from compiler.methods import MethodSettings
from model_defs.drafters.eagle3 import Eagle3Drafter
from model_defs.drafters.hub.readers import parse_answers
from model_defs.drafters.registry import load_drafter
from model_defs.target.model import Target
from redraft.console.output import err
from redraft.console.program import run


def main(
    model: Annotated[Path, typer.Option(help="Its target: a folder made by build/fetch_model.py.")],
    drafter: Annotated[Path, typer.Option(help="Drafter eagle3: of build/train_drafter.py, or of the hub.")],
    output: Annotated[Path, typer.Option(help="The checkpoint's folder; replaced when the export succeeds.")],
    form: Annotated[
        Form, typer.Option(help="speculators for vLLM; specforge for SGLang and TensorRT-LLM.")
    ] = Form.speculators,
    verifier: Annotated[
        str | None, typer.Option(help="The target's name on the hub; default: the model's folder.", show_default=False)
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Tokens that they draft at a time.")] = 5,
    read_as: Annotated[
        str | None, typer.Option(help=MethodSettings.model_fields["read_as"].description, show_default=False)
    ] = None,
) -> None:
    """Write a checkpoint of an EAGLE-3 drafter for vLLM, SGLang or TensorRT-LLM."""
    try:
        module = load_drafter(drafter, Target.from_folder(model), parse_answers(read_as))
        if type(module) is not Eagle3Drafter:  # P-EAGLE's is one too, with tensors that these forms do not have
            raise ValueError(f"{drafter} holds a drafter {module.name!r}, exported are {Eagle3Drafter.name!r}")
        export_eagle3(module, model, output, form, verifier or str(model), depth)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        err.print(f"[red]export_drafter:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    err.print(f"[green]{output}[/green]: EAGLE-3, {form} form")


if __name__ == "__main__":
    run("export_drafter", main)
