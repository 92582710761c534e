"""Convert drafters to the forms of other servers, and TensorRT-LLM's ReDrafter checkpoints back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from redraft.cli.options import FetchedModelOption
from redraft.compiler.checkpoints.eagle3 import Form, export_eagle3
from redraft.compiler.methods import MethodSettings
from redraft.compiler.trtllm.checkpoint import (
    TrtllmError,
    parallelism_of,
)
from redraft.compiler.trtllm.convert import Dtype, Settings, export_checkpoint, import_checkpoint
from redraft.compiler.trtllm.deployment import TARGET, Limits
from redraft.console.interrupt import interruptible
from redraft.console.output import err
from redraft.errors import BundleError
from redraft.model_defs.drafters.eagle3 import Eagle3Drafter
from redraft.model_defs.drafters.hub.readers import parse_answers
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target

USUAL_MAX_LEN = 2048

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def eagle3(
    model: FetchedModelOption,
    drafter: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Drafter of kind eagle3: of redraft train, or of the hub.")
    ],
    output: Annotated[Path, typer.Option(help="The checkpoint's folder; replaced when the export succeeds.")],
    form: Annotated[
        Form,
        typer.Option(
            "--format", help="The checkpoint's format: speculators for vLLM; specforge for SGLang and TensorRT-LLM."
        ),
    ] = Form.speculators,
    verifier: Annotated[
        str | None, typer.Option(help="The target's name on the hub; default: the model's folder.", show_default=False)
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Tokens that the server drafts at a time.")] = 5,
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
        err.print(f"[red]redraft export eagle3:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    err.print(f"[green]{output}[/green]: EAGLE-3, {form} form")


@app.command("trtllm")
@interruptible("redraft export", "nothing was written")
def trtllm(
    model: FetchedModelOption,
    drafter: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Drafter of kind recurrent: of redraft train, or Apple's.")
    ],
    output: Annotated[Path, typer.Option(help="The checkpoint's folder; replaced when the export succeeds.")],
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the target (tensor parallelism).")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Type of all weights.")] = Dtype.bfloat16,
    parallel_embedding: Annotated[
        bool, typer.Option("--parallel-embedding", help="Divide the embedding over the GPUs too, by tokens.")
    ] = False,
    beam_width: Annotated[
        int, typer.Option(min=1, max=50, help="Beams; TensorRT-LLM drafts from the 50 most likely tokens of a path.")
    ] = 4,
    beam_length: Annotated[int, typer.Option(min=1, help="Drafted tokens of a beam.")] = 5,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy/--sampled",
            help="Greedy output whatever a request asks for, or its temperature with ReDrafter's rejection rule, "
            "which does not preserve the target's distribution.",
        ),
    ] = True,
    zero_state: Annotated[
        bool,
        typer.Option(
            "--zero-state",
            help="Let a drafter that was trained from the first state s_1 = e_1 draft from zero, as TensorRT-LLM does.",
        ),
    ] = False,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt; default: all but one of --max-seq-len.")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; default: 2048 or the target's.")
    ] = None,
) -> None:
    """Write TensorRT-LLM's ReDrafter checkpoint, with scripts that build and serve its engines.

    It is written to a temporary folder and renamed: a failure leaves nothing, and an old checkpoint in place.
    """
    try:
        config = TargetConfig.load(model)
        length = max_seq_len or min(USUAL_MAX_LEN, config.max_position)
        limits = Limits(max_batch_size, max_input_len or length - 1, length)
        if length > config.max_position:
            raise TrtllmError(f"--max-seq-len {length}: the target's context has {config.max_position} positions")
        if limits.max_input_len >= length:
            raise TrtllmError(f"--max-input-len {limits.max_input_len}: expected less than --max-seq-len {length}")
        parallelism_of(config, tp)
        settings = Settings(tp, dtype, parallel_embedding, beam_width, beam_length, greedy, limits, zero_state)
        export_checkpoint(model, drafter, output, settings)
    except (BundleError, ValueError, OSError, KeyError) as error:
        fail(error)


@app.command("from-trtllm")
@interruptible("redraft export", "nothing was written")
def from_trtllm(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder: config.json and rank*.safetensors.")],
    output: Annotated[Path, typer.Option(help="Folder for target/ and drafter/; replaced when the import succeeds.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with the target's config.json and tokenizer, which TensorRT-LLM's files lack; "
            "default: what the export put beside them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Read a ReDrafter checkpoint back into a target's and a drafter's folder.

    Checkpoints that TensorRT-LLM's own convert_checkpoint.py wrote are read too, with --model.
    """
    try:
        import_checkpoint(checkpoint, model or checkpoint / TARGET, output)
    except (BundleError, ValueError, OSError, KeyError) as error:
        fail(error)


def fail(error: Exception) -> NoReturn:
    reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
    err.print(f"redraft export: {reason}", markup=False)
    raise typer.Exit(1)
