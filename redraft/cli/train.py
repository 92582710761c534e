"""Train a drafter of any kind on teacher data.

At each position the drafter is unrolled T steps along the teacher's text, and each step is scored against the teacher:
its distribution over the hot vocabulary (soft labels) or the text itself (hard), and, for drafters that predict hidden
states, the teacher's own. Only the drafter is trained. The run is cut into checkpoints; started again with the same
output folder it goes on from the last one. Beside the drafter it leaves `bigrams.npy`, each token's most frequent
successor in the teacher's answers, or that of the drafter that it began from where it learned from served answers.
"""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from safetensors import SafetensorError

from redraft.chat import template_digest
from redraft.cli.options import ModelOption, ThreadsOption, check_folder
from redraft.console.interrupt import interruptible
from redraft.console.progress import progress, size
from redraft.console.resources import free_disk, require_memory
from redraft.decoding.ngram import count_bigrams
from redraft.home import DEFAULT_MODEL, data_of, own_drafter
from redraft.model_defs.drafters.base import Decay
from redraft.model_defs.drafters.eagle3 import USUAL, Eagle3Drafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import count_numbers, model_digest
from redraft.runtime import BIGRAMS_FILE_NAME
from redraft.training.distillation import Labels, Trainer
from redraft.training.plan import usual_rows
from redraft.training.ranks import ranked, this_rank, versions
from redraft.training.run import (
    CHECKPOINT_S,
    CheckpointError,
    Run,
    checkpoint_bytes,
    prepare_drafter,
    say,
    settings_of,
    train,
    training_bytes,
)
from redraft.training.teacher_data import LARGEST_SHARE_HELD_OUT, USUAL_HELD_OUT, TeacherData
from redraft.whole_file import whole_file

KINDS = {name: kind for name, kind in DRAFTERS.items() if kind.is_trained}
LAYERED = [name for name, kind in KINDS.items() if issubclass(kind, Eagle3Drafter)]
"""The kinds that read what enters some layers of the target."""
GOES_ON = "the same command goes on from the last checkpoint"
GIVEN = ("hidden_size", "vocab_size", "hot_vocabulary", "layer")
SETTINGS = "; ".join(
    f"{name}: " + ", ".join(f"{f.name}={f.default}" for f in fields(kind.config_type) if f.name not in GIVEN)
    for name, kind in KINDS.items()
)


KindOption = Annotated[str, typer.Option(metavar=f"[{'|'.join(KINDS)}]", help="Kind of drafter.")]


def layers_of(kind: str) -> str | None:
    """The --target-layers of the teacher data that a kind of drafter is trained on."""
    return USUAL if kind in LAYERED else None


def save_bigrams(path: Path, data: list[Path], vocab_size: int, start_from: Path | None) -> None:
    """Write each token's most frequent successor in the answers of teacher data: what the n-gram branch of bundles of
    the drafter takes. Of served answers nothing is written, as they are kept for a while only: where some are trained
    on, the table is that of the drafter `start_from`, if it has one. It is written before the drafter is, so no drafter
    is without it, and whole or not at all."""
    teacher = TeacherData(data, 0, prompts=False)
    if teacher.has_served:
        if start_from is not None and (start_from / path.name).is_file():
            with whole_file(path) as partial:
                shutil.copyfile(start_from / path.name, partial)
        return
    table = count_bigrams([tokens.numpy() for tokens in teacher.answers()], vocab_size)
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, table)


@interruptible("redraft train", GOES_ON)
@ranked("redraft train", GOES_ON)
def main(
    model: ModelOption = Path(DEFAULT_MODEL),
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Teacher data of redraft distill, or the folder of redraft serve --learn; may be given several times. "
            "Default: what distill wrote for this model and kind."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the drafter, its checkpoint and its log; default: REDRAFT_HOME/drafters/NAME, or "
            "NAME-KIND where that is not recurrent."
        ),
    ] = None,
    kind: KindOption = "recurrent",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help=f"A setting of the drafter, name=value; may be given several times. Defaults: {SETTINGS}."
        ),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="A trained drafter to go on from; its shape is kept. Default: a new one.")
    ] = None,
    positions: Annotated[
        int, typer.Option(min=1, help="Positions to train on; the learning rate decays over them.")
    ] = 5_000_000,
    labels: Annotated[
        Labels, typer.Option(help="What is learned: the teacher's distributions (soft), or the text itself (hard).")
    ] = Labels.soft,
    hidden_weight: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Weight of the hidden states' squared error; default: the drafter's."),
    ] = None,
    hot_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most frequent tokens, the only ones that the drafter proposes; 0: every token. Default: 12,288; on "
            "a GPU 32,768, or all of up to 40,000. On a GPU, info_vocabulary has the same default.",
            show_default=False,
        ),
    ] = None,
    unroll: Annotated[int, typer.Option(min=1, help="Drafting steps T in the loss.")] = 5,
    window: Annotated[
        int | None, typer.Option(min=1, help="Consecutive positions per window; default: the drafter's.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Windows per step, those of all ranks together; default: the drafter's."),
    ] = None,
    accumulate: Annotated[
        int,
        typer.Option(min=1, help="Pieces of a batch, one after the other on each rank, which take less memory."),
    ] = 1,
    peak_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Peak learning rate (Adam); default: the drafter's.")
    ] = None,
    decay: Annotated[Decay | None, typer.Option(help="How the learning rate falls; default: the drafter's.")] = None,
    held_out_shards: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Shards to judge by: of redraft distill --held-out where given, else of --data. Default: "
            f"{USUAL_HELD_OUT}, of --data at most {LARGEST_SHARE_HELD_OUT:.0%} of the shards.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help=f"Steps between evaluations; a checkpoint comes every {CHECKPOINT_S:.0f} s too.")
    ] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the data order and the weights.")] = 0,
    threads: ThreadsOption = None,
) -> None:
    """Train a drafter by distillation; resumes when the output folder has a checkpoint."""
    ranks = this_rank()
    if threads := threads or ranks.threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in KINDS:
        raise typer.BadParameter(f"cannot train a drafter {kind!r}; known are {', '.join(KINDS)}")
    drafter_type = KINDS[kind]
    recipe = drafter_type.recipe
    output = output or own_drafter(model.name, kind)
    if not data:
        written = data_of(model.name, layers_of(kind))
        judged_by = written.with_name(f"{written.name}-held-out")
        data = [written, *([judged_by] if judged_by.is_dir() else [])]
    run = Run(
        positions,
        window or recipe.window,
        batch or recipe.batch,
        accumulate,
        recipe.peak_rate if peak_rate is None else peak_rate,
        decay or recipe.decay,
        every,
        seed,
    )
    resumed = output if (output / "checkpoint.safetensors").exists() else None
    console = Console(stderr=True, quiet=not ranks.first)
    with progress("train", positions, "positions", "loading the target", console) as bar:
        try:
            with ranks.agreement() as facts:
                check_folder(output, "--output")
                if run.batch < (pieces := ranks.count * accumulate):
                    raise ValueError(
                        f"--batch {run.batch}: expected a window at least for each of {pieces} pieces of a batch"
                    )
                teacher = TeacherData(data, held_out_shards, drafter_type.reads_context)
                digest = model_digest(model)
                teacher.require_model(model.name, digest)
                teacher.require(run.batch, run.window, unroll)
                require_memory(4 * count_numbers(model) * ranks.local_count, "training beside the target")
                target = Target.from_folder(model).to(device)
                fingerprint = target_fingerprint(target)
                teacher.require_target(fingerprint)
                vocab_size = target.config.vocab_size
                chosen = usual_rows(vocab_size, device.type) if hot_tokens is None else hot_tokens or vocab_size
                configured = settings_of(drafter_type, settings or [], vocab_size, device.type)
                rows = min(chosen, vocab_size)
                module = prepare_drafter(drafter_type, target, teacher, rows, configured, start_from, resumed)
                module = module.to(device)
                module.require_steps(unroll, f"--unroll {unroll}")
                teacher.require_layers(module.feature_layers)
                loss_weight = recipe.hidden_weight if hidden_weight is None else hidden_weight
                if loss_weight and module.head_weight is not module.head_rows:
                    raise ValueError("--hidden-weight must be 0: this drafter's own head reads no hidden states")
                disk, memory = checkpoint_bytes(module), training_bytes(target, module, teacher)
                if disk > (free := free_disk(output)):
                    raise ValueError(f"{output} takes {size(disk)}, and {size(free)} of its disk are free")
                require_memory(memory * ranks.local_count, "training")
                facts |= {"versions": versions(), "model": digest, "teacher data": str(teacher)}
                facts["drafter"] = f"{kind} {module.config}"
                facts["options"] = f"{run} --labels {labels} --unroll {unroll} --hidden-weight {loss_weight}"
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        shards = len(teacher.training)
        judged = (
            f"{len(teacher.evaluation)} held out to judge by" if teacher.evaluation else "none to judge by: too few"
        )
        say(f"{kind} drafter on {shards} shards of teacher data, {judged}")
        say(f"{positions:,} positions; about {size(memory)} of memory and {size(disk)} of disk at {output}")
        trainer = Trainer(target, module, labels, unroll, loss_weight)
        card: dict[str, str | float | None] = {
            "target_fingerprint": fingerprint,
            "chat_template": template_digest(model),
        }
        try:
            if ranks.first:  # the others take its weights
                output.mkdir(parents=True, exist_ok=True)
                if not resumed and not start_from:
                    bar.update(0, "setting the first weights")
                    module.initialize(target, teacher.sample(run.window, unroll).to(device))
                save_bigrams(output / BIGRAMS_FILE_NAME, data, vocab_size, start_from)
            train(trainer, teacher, run, output, card, resumed is None, bar, ranks)
        except CheckpointError as error:
            raise typer.BadParameter(str(error)) from None
        except (OSError, SafetensorError) as error:
            raise typer.BadParameter(ranks.named(f"{error}; {GOES_ON}")) from None
