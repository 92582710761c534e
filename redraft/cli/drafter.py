"""Make a drafter for a model within a time: teacher data, training, bundles, and what was gained."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from redraft.bundle.backends import OPENVINO, TORCH, Backend, Precision, check_precision
from redraft.bundle.manifest import check_cpu
from redraft.cli.bundles import NGRAMS, usual_precision
from redraft.cli.distill import teacher_engine
from redraft.cli.options import BACKEND_NAMES, ColumnOption, ModelOption, PromptsOption, backend_named, check_folder
from redraft.cli.steps import Steps
from redraft.cli.train import KINDS, KindOption, layers_of
from redraft.console.interrupt import interruptible
from redraft.console.output import fail
from redraft.console.progress import write
from redraft.errors import BundleError
from redraft.home import DEFAULT_MODEL, PROMPTS, data_of, own_drafter
from redraft.model_defs.drafters.registry import RECURRENT
from redraft.model_defs.weights.folder import model_digest
from redraft.prompts import load_prompts, read_prompts
from redraft.training.gains import fitting_prompts, measure_gains, shipped_curves, summary, unseen_prompts
from redraft.training.plan import plan_training
from redraft.training.prompts import prompts_digest
from redraft.training.ranks import ranked, this_rank, versions
from redraft.training.teacher_data import cutoff_of_shards

LOG = "drafter.log"
GOES_ON = "the same command goes on"


@interruptible("redraft drafter", GOES_ON)
@ranked("redraft drafter", GOES_ON)
def main(
    model: ModelOption = Path(DEFAULT_MODEL),
    kind: KindOption = RECURRENT,
    prompts: PromptsOption = None,
    column: ColumnOption = None,
    hours: Annotated[
        float, typer.Option(min=0, max=10_000, help="Hours for teacher data and training together.")
    ] = 1.0,
    output: Annotated[
        Path | None, typer.Option(help="The drafter's folder; default: the one that redraft serve and build look in.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the teacher data; default: REDRAFT_HOME/data/NAME.")
    ] = None,
    backend: Annotated[
        Backend, typer.Option(parser=backend_named, metavar=BACKEND_NAMES, help="What executes the bundles.")
    ] = OPENVINO,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Stored weights of the bundles; default: source on CPUs where the model is quantized, fp8 on torch "
            "where it is in fp8, else bf16.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a drafter for a model within a time, and say what it gains.

    Writes teacher data, trains, builds bundles with and without the drafter, and measures both. It can be
    killed at any time; the same command goes on from there. Steps are printed as commands. torchrun runs it on several
    ranks, of which the first one does what follows the training.
    """
    ranks = this_rank()
    if ranks.threads:
        torch.set_num_threads(ranks.threads)
    layers = layers_of(kind)
    output, data = output or own_drafter(model.name, kind), data or data_of(model.name, layers)
    try:
        with ranks.agreement() as facts:
            if not hours:
                raise ValueError(f"--hours {hours:g}: expected a number above 0, such as 0.5")
            if kind not in KINDS:
                raise ValueError(f"--kind {kind}: expected one of {', '.join(KINDS)}")
            try:
                precision = precision or usual_precision(model, backend, Precision.bf16)
                check_precision(backend, precision)
                check_cpu(backend)
            except BundleError as error:  # before the hours, not after them
                raise ValueError(error) from None
            check_folder(output, "--output")
            check_folder(data, "--data")
            load = load_prompts if ranks.first else lambda *source: read_prompts(*source).prompts
            texts = load(prompts or PROMPTS, column if prompts else None)
            facts |= {"versions": versions(), "model": model_digest(model), "prompts": prompts_digest(texts)}
            facts["options"] = f"--kind {kind} --hours {hours:g} --backend {backend.name} --precision {precision.value}"
        for folder in (output, data):
            ranks.require_common(folder)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not ranks.first)
    steps = Steps(ranks.program("redraft drafter"), output / LOG if ranks.first else None, console=console)

    def say(text: str) -> None:
        write(console, f"redraft drafter: {text}")
        steps.log(text)

    reading = ["--prompts", prompts, *(["--column", column] if column else [])] if prompts else []
    begun = time.monotonic()
    try:
        # A GPU writes teacher data many times as fast, whatever executes the bundles.
        teacher_backend = TORCH if torch.cuda.is_available() and backend is OPENVINO else backend
        engine = ranks.in_turn(lambda: teacher_engine(model, data, layers, steps, teacher_backend))
        plan = plan_training(output / "plan.json", model, engine, data, texts, hours, say, kind, layers, ranks)
        for line in plan.lines():
            say(line)
        layered = ["--target-layers", layers] if layers else []
        steps.run(
            "distill", "--model", model, "--output", data, "--tokens", plan.tokens, "--bundle", engine,
            *reading, *layered,
        )  # fmt: skip
        steps.run(
            "train", "--model", model, "--kind", kind, "--data", data, "--data", f"{data}-held-out",
            "--output", output, "--positions", plan.positions, *(["--batch", plan.batch] if plan.batch else []),
        )  # fmt: skip
        if not ranks.first:
            return
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        usual = {"--model": str(model), "--backend": backend.name, "--precision": precision.value}
        ngrams = steps.built_bundle(usual | NGRAMS)["--output"]
        bundle = steps.built_bundle(usual | {"--drafter": str(output)})["--output"]
        unseen = unseen_prompts(texts if prompts else [], cutoff_of_shards(data), load_prompts(PROMPTS))
        bundles = Path(ngrams), Path(bundle)
        gains = measure_gains(output, *bundles, fitting_prompts(model, bundles, unseen))
    except (OSError, ValueError, BundleError) as error:
        steps.log(str(error))
        fail(f"{steps.program}: {error}", 2)
    for line in summary(gains, shipped_curves()):
        print(line)
        steps.log(line)
    say(f"done in {(time.monotonic() - begun) / 60:.0f} minutes; `redraft serve --bundle {bundle}` serves it")
