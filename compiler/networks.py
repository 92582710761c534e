"""Writes the networks of a bundle: one writer for each backend.

Writers import what only their backend needs: `torch` bundles are built on machines without ONNX.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from compiler.calibration import Calibration
from compiler.engine_builder import EngineBuilder
from model_defs.drafters.hidden_state import Resampler
from model_defs.export.drafter import (
    Drafting,
    export_drafter_native,
    export_drafter_plugin,
    export_resampler_native,
    export_resampler_plugin,
)
from model_defs.export.target import CacheShape, export_target_native, export_target_plugin
from model_defs.loops.beam_search import BeamSearch
from model_defs.target.model import Target
from model_defs.target.shards import plan_shards, shard_target
from redraft.bundle.config import BundleConfig, target_folder
from redraft.console.progress import duration, heartbeat
from redraft.engines.tensorrt.engine import dtype_of
from redraft.plugins.library import operators_digest

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.passes.fusing import Constants

Loops = dict[str, Drafting]
"""The drafting loops of a bundle's methods: one object for those of the same network."""
SUFFIXES = (".onnx", ".pt2", ".engine", ".engine.json")
"""Of a network's files; copies name the data of the first."""
CALIBRATION = "calibration.json"
"""What a bundle in fp8 keeps of its calibration."""
out = Console(stderr=True, highlight=False, soft_wrap=True)

DRAFTER_PRECISION = {"fp32": "fp32", "bf16": "w8a8", "int8": "w8a8"}
"""How a drafter computes beside a target's precision: drafts decide speed, never output."""


def write_openvino(config: BundleConfig, target: Target, loops: Loops, folder: Path, hidden: bool) -> dict[str, str]:
    """Plugin-form networks, lowered to the CPU operators. The methods share their weights."""
    from compiler.passes.fusing import Constants
    from compiler.passes.lowering import lower

    cache_dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    for part in target_parts(config, target, folder):
        with step(f"export {part.name}"):
            network = export_target_plugin(
                part.target,
                cache_shape(config),
                cache_dtype=cache_dtype,
                hidden_output=hidden and part.rank == 0,
                rank=part.rank,
                ranks=config.tensor_parallel,
            )
        with step(f"compile {part.name} ({config.precision})"):
            weights = Constants()
            save_cpu_network(lower(network, config.precision), part.folder / "target.onnx", weights)
            weights.stored().tofile(part.folder / "target.weights")
    constants, precision = Constants(), DRAFTER_PRECISION[config.precision]
    for name, names, loop in distinct(loops, folder):
        with step(f"export and compile {names}"):
            save_cpu_network(
                lower(export_drafter_plugin(loop, cache_dtype), precision), folder / f"drafter.{name}.onnx", constants
            )
            if again := resampling_loop(config, name, loop):
                save_cpu_network(
                    lower(export_resampler_plugin(again), precision), folder / f"resampler.{name}.onnx", constants
                )
    if loops:
        constants.stored().tofile(folder / "drafters.weights")
    return {"openvino": version("openvino"), "operators": operators_digest()}


def write_torch(config: BundleConfig, target: Target, loops: Loops, folder: Path, hidden: bool) -> dict[str, str]:
    """Exported programs."""
    from model_defs.export.programs import (
        export_drafter_torch,
        export_resampler_torch,
        export_target_torch,
        in_precision,
    )

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision]
    for part in target_parts(config, target.to(dtype), folder):
        with step(f"export {part.name}"):
            program = export_target_torch(
                part.target,
                cache_shape(config),
                hidden_output=hidden and part.rank == 0,
                rank=part.rank,
                ranks=config.tensor_parallel,
            )
            save_program(program, part.folder / "target.pt2")
    for name, names, loop in distinct(loops, folder):
        with step(f"export {names}"):
            save_program(export_drafter_torch(in_precision(loop, dtype)), folder / f"drafter.{name}.pt2")
            if again := resampling_loop(config, name, loop):
                save_program(export_resampler_torch(again), folder / f"resampler.{name}.pt2")
    return {}


def write_tensorrt(config: BundleConfig, target: Target, loops: Loops, folder: Path, hidden: bool) -> dict[str, str]:
    """Networks, and the engines that a TensorRT builds from them: the target's in the form that the bundle asks for,
    all others in native form."""
    from compiler.passes import tensorrt_all_reduce as all_reduce
    from compiler.passes import tensorrt_attention as tree_attention

    builder = EngineBuilder(config)
    dtype, cache = dtype_of(builder.flavour, config.precision), cache_shape(config)
    for part in target_parts(config, target.to(dtype), folder):
        network, gives_hidden = part.folder / "target.onnx", hidden and part.rank == 0
        ranks = {"rank": part.rank, "ranks": config.tensor_parallel}
        with step(f"export {part.name}"):
            if config.plugin_form:
                form = export_target_plugin(
                    part.target, cache, cache_dtype=dtype, aliased_outputs=True, hidden_output=gives_hidden, **ranks
                )
                form = tree_attention.tensorrt_form(quantized(form, config.precision, folder), config.alias)
            else:
                form = export_target_native(part.target, cache, hidden_output=gives_hidden, **ranks)
                form = quantized(form, config.precision, folder)
            save(all_reduce.tensorrt_form(form), network)
        with step(f"build the engine of {part.name}"):
            builder.build_target(network, part.rank)
    for name, names, loop in distinct(loops, folder):
        network, context = folder / f"drafter.{name}.onnx", config.methods[name].context
        again = resampling_loop(config, name, loop.to(dtype))
        with step(f"export {names} and build the engine"):
            rows = config.limits.max_len + context.draft_rows if context else 0
            save(export_drafter_native(loop, rows, raw_logits=again is not None), network)
            builder.build_drafter(network, reads_context=context is not None)
        if again:
            network = folder / f"resampler.{name}.onnx"
            with step(f"export what re-samples for {names} and build the engine"):
                save(export_resampler_native(again), network)
                builder.build_drafter(network, reads_context=False)
    return builder.versions


def extents(loop: Drafting) -> tuple[object, ...]:
    """What tells apart the loops of one drafter, and so their networks."""
    if isinstance(loop, BeamSearch):
        return loop.width, loop.length, loop.candidates
    return loop.rule, loop.levels, loop.support


def distinct(loops: Loops, folder: Path) -> Iterator[tuple[str, str, Drafting]]:
    """Each loop once: its first method, under whose name to write its networks, the names of all of them, and the loop.
    What was written is then copied for the others."""
    methods: dict[int, list[str]] = {}
    for name, loop in loops.items():
        methods.setdefault(id(loop), []).append(name)
    for names in methods.values():
        first, *others = names
        yield first, ", ".join(names), loops[first]
        for kind, suffix in itertools.product(("drafter", "resampler"), SUFFIXES):
            if (written := folder / f"{kind}.{first}{suffix}").exists():
                for other in others:
                    shutil.copy2(written, folder / f"{kind}.{other}{suffix}")


def resampling_loop(config: BundleConfig, name: str, loop: Drafting) -> BeamSearch | None:
    """The loop that drafts again from what is left of a chain, for a method whose drafter leaves one."""
    levels = config.methods[name].chain_levels
    if not levels or not isinstance(loop, BeamSearch):
        return None
    return BeamSearch(Resampler(loop.drafter, levels), loop.width, levels, loop.candidates)


WRITERS = {"openvino": write_openvino, "torch": write_torch, "tensorrt": write_tensorrt, "tensorrt_rtx": write_tensorrt}


def quantized(network: ir.Model, precision: str, folder: Path) -> ir.Model:
    """A target's network with 8-bit linear layers where the precision asks for them, calibrated by the file in the
    bundle's folder. Everything else keeps the network's dtype."""
    from compiler.passes.quantization import FP8, QUANTIZED, quantize_network

    if precision not in QUANTIZED:
        return network
    largest_inputs = Calibration.load(folder / CALIBRATION).largest_inputs if precision == FP8 else None
    return quantize_network(network, precision, largest_inputs)


@dataclass(frozen=True)
class TargetPart:
    """What one rank executes of a target, and where its networks go."""

    rank: int
    name: str
    target: Target
    folder: Path


def target_parts(config: BundleConfig, target: Target, folder: Path) -> Iterator[TargetPart]:
    """One for each rank, and its folder; of one rank, the target."""
    if config.tensor_parallel == 1:
        yield TargetPart(0, "the target", target, folder)
        return
    for rank, shard in enumerate(plan_shards(target.config, config.tensor_parallel)):
        own = target_folder(folder, rank, config.tensor_parallel)
        own.mkdir()
        yield TargetPart(rank, f"the target of rank {rank}", shard_target(target, shard), own)


def cache_shape(config: BundleConfig) -> CacheShape:
    """The cache that a bundle's limits ask for."""
    return CacheShape(config.limits.slots, config.limits.max_len, config.limits.max_tree)


def save_cpu_network(network: ir.Model, path: Path, constants: Constants) -> None:
    """Write a lowered network, whose programs' weights go to `constants`."""
    import onnx_ir as ir

    from compiler.passes.fusing import detach_constants, fuse

    fused = fuse(network, constants)
    detach_constants(fused)
    ir.save(fused, path)


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program without the inputs that it was exported with: caches are as large as the limits ask."""
    program.example_inputs = None
    torch.export.save(program, path)


def save(network: ir.Model, path: Path) -> None:
    """Write a network with its weights beside it."""
    import onnx_ir as ir

    ir.save(network, path, external_data=f"{path.name}.data")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Show that a step is under way, in a log every few seconds, and how long it took."""
    start = time.monotonic()
    lines = heartbeat(lambda: f"  {name}: {duration(time.monotonic() - start)} so far", out)
    with out.status(name) if out.is_terminal else lines:
        yield
    out.print(f"  {name}: {time.monotonic() - start:.1f} s")
