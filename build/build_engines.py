"""Export a target and its drafter, and compile them into an engine bundle."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import torch
import typer
from rich.console import Console

from model_defs.config import UnsupportedModelError
from model_defs.drafters import DRAFTERS, RECURRENT, load_drafter
from model_defs.drafting import BeamSearch
from model_defs.export import (
    CacheShape,
    Drafting,
    export_drafter_native,
    export_drafter_plugin,
    export_resampler_plugin,
    export_target_native,
    export_target_plugin,
)
from model_defs.files import read_json
from model_defs.fingerprint import target_fingerprint
from model_defs.hidden_state import HiddenStateDrafter, Resampler
from model_defs.random_draws import RandomDraws
from model_defs.target import Target
from plugins.cpu.lowering import lower
from plugins.library import operators_digest
from plugins.program.fuse import Constants, detach_constants, fuse
from redraft.bundle import BundleConfig, BundleError, ContextInfo, DraftingInfo, LimitsInfo, TargetInfo
from redraft.bundle_writer import copy_tokenizer, finish_bundle, new_bundle
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.verification import VERIFIERS, check_pairing

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1.1}
BIGRAMS = "bigrams.npy"
HIDDEN_STATE = HiddenStateDrafter.name
out = Console(stderr=True, highlight=False, soft_wrap=True)


class Backend(StrEnum):
    openvino = "openvino"
    torch = "torch"
    tensorrt_rtx = "tensorrt_rtx"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    fp16 = "fp16"


PRECISIONS = {
    Backend.openvino: (Precision.fp32, Precision.bf16, Precision.int8),
    Backend.torch: (Precision.fp32, Precision.bf16),
    Backend.tensorrt_rtx: (Precision.fp16, Precision.bf16, Precision.fp32),
}


USUAL_BUDGET, USUAL_SUPPORT = 16, 64
CONSTRUCTION_HELP = (
    f"How draft trees are made: {', '.join(CONSTRUCTIONS)}; at random: {', '.join(RANDOM_CONSTRUCTIONS)}."
)
LEVELS_HELP = (
    "Random draws at each depth, such as 4,2,1: children of every node (gumbel_top_k), or nodes of the depth. Default: "
    + "; ".join(f"{name} {','.join(map(str, known.levels))}" for name, known in RANDOM_CONSTRUCTIONS.items())
)
VERIFICATION_HELP = (
    f"Which drafted tokens are kept: {', '.join(VERIFIERS)}. Default: sampled_walk; at random: "
    + ", ".join(f"{known.verification} ({name})" for name, known in RANDOM_CONSTRUCTIONS.items())
)


def main(
    model: Annotated[Path, typer.Option(help="Target: a folder made by build/fetch_model.py.")],
    output: Annotated[Path, typer.Option(help="The bundle's folder; replaced when the build succeeds.")],
    drafter: Annotated[
        Path | None, typer.Option(help="Trained drafter's folder. Without it: --no-drafter must be given.")
    ] = None,
    no_drafter: Annotated[
        bool, typer.Option("--no-drafter", help="An auto-regressive bundle without drafter.")
    ] = False,
    hidden_states: Annotated[
        bool, typer.Option("--hidden-states", help="Output hidden states without a drafter too, as distill.py needs.")
    ] = False,
    backend: Annotated[Backend, typer.Option(help="What executes the networks.")] = Backend.openvino,
    precision: Annotated[
        Precision | None, typer.Option(help="Stored weights; default bf16 (tensorrt_rtx: fp16).", show_default=False)
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    max_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; default: 2048 or the target's.")
    ] = None,
    max_tree: Annotated[int, typer.Option(min=1, help="Rows of a draft tree, root included.")] = 32,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt rows in one step.")] = 128,
    construction: Annotated[str, typer.Option(help=CONSTRUCTION_HELP)] = "best_first",
    beam_width: Annotated[int, typer.Option(min=1, help="Nodes that the drafter expands at each depth.")] = 4,
    beam_length: Annotated[int, typer.Option(min=1, help="Depth of the drafts.")] = 5,
    candidates: Annotated[int, typer.Option(min=1, help="Children of an expanded node.")] = 8,
    levels: Annotated[str | None, typer.Option(help=LEVELS_HELP, show_default=False)] = None,
    support: Annotated[
        int, typer.Option(min=1, help="Likeliest tokens that random draws are from, at each node.")
    ] = USUAL_SUPPORT,
    tree_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Drafted nodes a step until the bundle is tuned; default: 16, or all of --levels.",
            show_default=False,
        ),
    ] = None,
    ngram: Annotated[
        bool | None,
        typer.Option(
            "--ngram/--no-ngram",
            help="Merge an n-gram branch; default: where there is a drafter, and a verification that allows it.",
        ),
    ] = None,
    verification: Annotated[str | None, typer.Option(help=VERIFICATION_HELP, show_default=False)] = None,
    resample_above: Annotated[
        int | None,
        typer.Option(
            min=0, help="Draft again from a rejected draft's chain where more steps than this are left of it."
        ),
    ] = None,
    skip_above: Annotated[
        int | None,
        typer.Option(min=0, help="Where more steps than this are left, do so instead of a new draft."),
    ] = None,
) -> None:
    """Export a target and its drafter, and compile them into an engine bundle.

    The bundle is written to a temporary folder and renamed: a failure leaves nothing, and an old bundle in place.
    """
    try:
        if (drafter is None) != no_drafter:
            raise BundleError("give either --drafter FOLDER or --no-drafter")
        precision = precision or (Precision.fp16 if backend == Backend.tensorrt_rtx else Precision.bf16)
        if precision not in PRECISIONS[backend]:
            raise BundleError(f"--precision {precision}: {backend} takes {', '.join(PRECISIONS[backend])}")
        with step("load the target"):
            target = Target.from_folder(model)
        plan = None
        if drafter or ngram:
            random = RANDOM_CONSTRUCTIONS.get(construction) if drafter else None
            if levels and random is None:
                raise BundleError(f"--levels {levels}: only for {', '.join(RANDOM_CONSTRUCTIONS)}, not {construction}")
            draws = (parse_levels(levels) if levels else random.levels) if random else ()
            verification = verification or (random.verification if random else "sampled_walk")
            plan = DraftingInfo(
                drafter=read_json(drafter / "config.json").get("drafter", RECURRENT) if drafter else None,
                construction=construction if drafter else None,
                beam_width=beam_width,
                beam_length=beam_length,
                candidates=candidates,
                tree_budget=tree_budget or (sum(random.shape(draws).widths) if random else USUAL_BUDGET),
                ngram=verification in VERIFIERS and VERIFIERS[verification].merges if ngram is None else ngram,
                verification=verification,
                levels=draws,
                support=support if random else 0,
                resample_above=resample_above,
                skip_above=skip_above,
            )
        config = BundleConfig(
            name=output.name,
            backend=backend.value,
            precision=precision.value,
            target=target_info(target),
            limits=LimitsInfo(
                slots=slots,
                max_len=min(2048, target.config.max_position) if max_len is None else max_len,
                max_tree=max_tree,
                prefill_chunk=prefill_chunk,
            ),
            drafting=plan,
        )
        check(config, target)
        build(config, target, model, drafter, output, hidden_states or drafter is not None)
    except (BundleError, UnsupportedModelError, FileNotFoundError, KeyError, ValueError) as error:
        out.print(f"[red]build_engines:[/red] {error.args[0] if isinstance(error, KeyError) else error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        out.print("build_engines: interrupted, nothing was written")
        raise typer.Exit(130) from None


def target_info(target: Target) -> TargetInfo:
    """What the run time needs to know of a target."""
    fields = {name: getattr(target.config, name) for name in TargetInfo.model_fields}
    return TargetInfo(**fields)


def parse_levels(text: str) -> tuple[int, ...]:
    """Numbers of draws from "4,2,1". Raises BundleError."""
    counts = text.split(",")
    if not all(count.strip().isdecimal() and int(count) for count in counts):
        raise BundleError(f"--levels {text}: expected whole numbers of 1 or more with commas between them")
    return tuple(map(int, counts))


def check(config: BundleConfig, target: Target) -> None:
    """Refuse limits and plans that cannot work. Raises BundleError or ValueError."""
    limits, drafting = config.limits, config.drafting
    if limits.max_len > target.config.max_position:
        raise BundleError(
            f"--max-len {limits.max_len}: the target's context has {target.config.max_position} positions"
        )
    if drafting is None:
        return
    merged = drafting.ngram or drafting.resample_above is not None
    check_pairing(drafting.construction or "chain", drafting.verification, merged)
    if drafting.drafter and drafting.drafter not in DRAFTERS:
        raise BundleError(f"unknown drafter {drafting.drafter!r}; known are {', '.join(DRAFTERS)}")
    if drafting.drafter and config.backend == Backend.tensorrt_rtx and DRAFTERS[drafting.drafter].reads_context:
        raise BundleError(f"--backend {config.backend}: a drafter {drafting.drafter!r} keeps a context, which it lacks")
    if drafting.resample_above is not None and (drafting.drafter, config.backend) != (HIDDEN_STATE, Backend.openvino):
        raise BundleError(
            f"--resample-above {drafting.resample_above}: only drafters {HIDDEN_STATE!r} in {Backend.openvino} engines "
            f"leave a chain behind, this is {drafting.drafter!r} in {config.backend}"
        )
    if drafting.resample_above is not None and drafting.levels:
        raise BundleError(f"--resample-above {drafting.resample_above}: random draws leave no chain behind")
    if drafting.skip_above is not None and drafting.resample_above is None:
        raise BundleError(f"--skip-above {drafting.skip_above}: expected --resample-above too")
    if drafting.tree_budget >= limits.max_tree:
        given = f"--levels {','.join(map(str, drafting.levels))}, " if drafting.levels else ""
        raise BundleError(
            f"{given}--tree-budget {drafting.tree_budget}: expected less than --max-tree {limits.max_tree}"
        )
    if not drafting.levels and drafting.candidates < drafting.beam_width:
        raise BundleError(f"--candidates {drafting.candidates}: expected at least --beam-width {drafting.beam_width}")


def build(
    config: BundleConfig, target: Target, model: Path, drafter_folder: Path | None, output: Path, hidden: bool
) -> None:
    """Write the bundle. Raises BundleError or ValueError."""
    fingerprint = target_fingerprint(target)
    drafter = None
    if drafter_folder is not None:
        config, drafter = add_drafter(drafter_folder, target, fingerprint, config)
    parameters = sum(weight.numel() for module in (target, drafter) if module for weight in module.parameters())
    needed = parameters * BYTES_PER_WEIGHT[config.precision] * (3 if config.backend == "tensorrt_rtx" else 1.3)
    with new_bundle(output, int(needed) + 20_000_000) as folder:
        versions = WRITERS[Backend(config.backend)](config, target, drafter, folder, hidden)
        with step("write the manifest"):
            copy_tokenizer(model, folder)
            if drafter_folder and (drafter_folder / BIGRAMS).is_file():
                shutil.copy2(drafter_folder / BIGRAMS, folder / BIGRAMS)
            versions |= {"torch": torch.__version__, "python": platform.python_version()}
            command = shlex.join(["python", "build/build_engines.py", *sys.argv[1:]])
            finish_bundle(folder, config, versions, fingerprint, command)
    size = sum(file.stat().st_size for file in output.iterdir())
    out.print(f"[green]{output}[/green]: {config.backend} {config.precision}, {size / 1e6:.0f} MB")


def add_drafter(folder: Path, target: Target, fingerprint: str, config: BundleConfig) -> tuple[BundleConfig, Drafting]:
    """The configuration with what a trained drafter needs, and its drafting loop. Raises BundleError where it was
    trained for another target, or is not whole, and ValueError where it cannot draft so deep."""
    with step("load the drafter"):
        raw = read_json(folder / "config.json")
        if raw.get("target_fingerprint") not in (None, fingerprint):
            raise BundleError(
                f"{folder} was trained for another target: fingerprint {raw['target_fingerprint']}, "
                f"this one's is {fingerprint}"
            )
        plan = config.drafting
        assert plan is not None
        try:
            drafter = load_drafter(folder, target)
        except (KeyError, RuntimeError) as error:
            raise BundleError(f"{folder} is not a whole drafter: {error}") from None
        random = RANDOM_CONSTRUCTIONS.get(plan.construction or "")
        length = len(plan.levels) if random else plan.beam_length
        draft_rows = sum(random.shape(plan.levels).widths[:-1]) if random else plan.beam_width * (length - 1)
        drafter.prepare(config.limits.max_len + draft_rows, length)
        if drafter.reads_context:
            plan = plan.model_copy(
                update={
                    "context": ContextInfo(
                        layers=drafter.context_layers, draft_rows=draft_rows, from_text=drafter.reads_text
                    )
                }
            )
        if not random and drafter.has_raw_logits and config.backend == Backend.openvino:
            plan = plan.model_copy(update={"chain_levels": plan.beam_length - 1})
        loop: Drafting = (
            RandomDraws(drafter, random.rule, plan.levels, plan.support)
            if random
            else BeamSearch(drafter, plan.beam_width, plan.beam_length, plan.candidates)
        )
    if table := getattr(drafter, "info_table", None):
        out.print(f"  token info: {table.nbytes / 1e6:.1f} MB in {str(table.rows.dtype).removeprefix('torch.')}")
    return config.model_copy(update={"drafting": plan}), loop.eval()


DRAFTER_PRECISION = {"fp32": "fp32", "bf16": "w8a8", "int8": "w8a8"}
"""How a drafter computes beside a target's precision: drafts decide speed, never output."""


def write_openvino(config: BundleConfig, target: Target, drafter: Drafting | None, folder: Path, hidden: bool) -> dict:
    """Plugin-form networks, lowered to the CPU operators."""
    cache_dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    with step("export the target"):
        network = export_target_plugin(target, cache_shape(config), cache_dtype=cache_dtype, hidden_output=hidden)
    with step(f"compile the target ({config.precision})"):
        save_cpu_network(lower(network, config.precision), folder / "target.onnx")
    if drafter:
        with step("export and compile the drafter"):
            network = lower(export_drafter_plugin(drafter, cache_dtype), DRAFTER_PRECISION[config.precision])
            constants = Constants()
            save_cpu_network(network, folder / "drafter.onnx", constants)
            levels = config.drafting.chain_levels if config.drafting else 0
            if levels and isinstance(drafter, BeamSearch):
                again = BeamSearch(Resampler(drafter.drafter, levels), drafter.width, levels, drafter.candidates)
                resampler = lower(export_resampler_plugin(again), DRAFTER_PRECISION[config.precision])
                save_cpu_network(resampler, folder / "resampler.onnx", constants, weights=folder / "drafter.weights")
    return {"openvino": version("openvino"), "operators": operators_digest()}


def write_torch(config: BundleConfig, target: Target, drafter: Drafting | None, folder: Path, hidden: bool) -> dict:
    """Exported programs."""
    from model_defs.export_torch import export_drafter_torch, export_target_torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision]
    with step("export the target"):
        program = export_target_torch(target.to(dtype), cache_shape(config), hidden_output=hidden)
        torch.export.save(program, folder / "target.pt2")
    if drafter:
        with step("export the drafter"):
            torch.export.save(export_drafter_torch(drafter.float(), dtype), folder / "drafter.pt2")
    return {}


def write_tensorrt_rtx(
    config: BundleConfig, target: Target, drafter: Drafting | None, folder: Path, hidden: bool
) -> dict:
    """Native-form networks and the engines that TensorRT for RTX builds from them."""
    from redraft.engines.tensorrt_rtx import compile_drafter, compile_target

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    with step("export the target"):
        network = export_target_native(target.to(dtype), cache_shape(config), hidden_output=hidden)
        save(network, folder / "target.onnx")
    with step("build the target's engine"):
        compile_target(folder / "target.onnx", folder / "target.engine", config.limits)
    if drafter:
        with step("export the drafter and build its engine"):
            save(export_drafter_native(drafter.to(dtype)), folder / "drafter.onnx")
            compile_drafter(folder / "drafter.onnx", folder / "drafter.engine", config.limits)
    return {"tensorrt_rtx": version("tensorrt-rtx-cu13")}


WRITERS = {
    Backend.openvino: write_openvino,
    Backend.torch: write_torch,
    Backend.tensorrt_rtx: write_tensorrt_rtx,
}


def cache_shape(config: BundleConfig) -> CacheShape:
    """The cache that a bundle's limits ask for."""
    return CacheShape(config.limits.slots, config.limits.max_len, config.limits.max_tree)


def save_cpu_network(
    network: ir.Model, path: Path, constants: Constants | None = None, weights: Path | None = None
) -> None:
    """Write a lowered network, and the weights of its programs as `NAME.weights` or to the file that they share with
    those of another network, which was given the same `constants` before."""
    fused = fuse(network, constants)
    stored = detach_constants(fused)
    if stored is not None:
        stored.tofile(weights or path.with_suffix(".weights"))
    save(fused, path)


def save(network: ir.Model, path: Path) -> None:
    """Write a network with its weights beside it."""
    ir.save(network, path, external_data=f"{path.name}.data")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Show that a step is under way, and how long it took."""
    start = time.monotonic()
    with out.status(name):
        yield
    out.print(f"  {name}: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    typer.run(main)
