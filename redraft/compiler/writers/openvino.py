"""The writer of `openvino` bundles: plugin-form networks, lowered to the CPU operators."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import torch

from redraft.bundle.backends import Precision
from redraft.bundle.config import BundleConfig
from redraft.compiler.passes.fusing import Constants, detach_constants, fuse
from redraft.compiler.passes.lowering import lower
from redraft.compiler.writers.shared import Loops, cache_shape, distinct, resampling_loop, target_parts
from redraft.console.progress import step
from redraft.model_defs.export.drafter import export_drafter_plugin, export_resampler_plugin
from redraft.model_defs.export.target import export_target_plugin
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.blocks import StoredBlocks
from redraft.plugins.library import operators_digest
from redraft.plugins.operators.linear.blocks import BlockRows

DRAFTER_PRECISION = {"fp32": "fp32", "bf16": "int8", "int8": "int8", "int4": "int4", "source": "int4"}
"""The drafters' precision for a target's precision: drafts decide speed, never output."""


def write(config: BundleConfig, target: Target, loops: Loops, folder: Path, features: bool) -> dict[str, str]:
    """Write the networks to `folder`; the methods' drafters share their weights. Returns the versions for the
    manifest."""
    cache_dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    for part in target_parts(config, target, folder):
        with step(f"export {part.name}"):
            network = export_target_plugin(
                part.target,
                cache_shape(config),
                cache_dtype=cache_dtype,
                features_output=features and part.rank == 0,
                rank=part.rank,
                ranks=config.tensor_parallel,
            )
        with step(f"compile {part.name} ({config.precision})"):
            lowered = lower_target(network, config.precision, part.target.blocks)
            with (part.folder / "target.weights").open("wb") as file:
                save(lowered, part.folder / "target.onnx", Constants(file))
    if loops:
        with (folder / "drafters.weights").open("wb") as file:
            write_drafters(config, loops, folder, Constants(file), cache_dtype)
    return {"openvino": version("openvino"), "operators": operators_digest()}


def write_drafters(
    config: BundleConfig, loops: Loops, folder: Path, constants: Constants, cache_dtype: torch.dtype
) -> None:
    """Write the networks of drafters, whose weights go to `constants`."""
    precision = DRAFTER_PRECISION[config.precision]
    for name, names, loop in distinct(loops, folder):
        with step(f"export and compile {names}"):
            drafter = lower(export_drafter_plugin(loop, cache_dtype), precision)
            save(drafter, folder / f"drafter.{name}.onnx", constants)
            if again := resampling_loop(config, name, loop):
                resampler = lower(export_resampler_plugin(again), precision)
                save(resampler, folder / f"resampler.{name}.onnx", constants)


def lower_target(network: ir.Model, precision: Precision, blocks: StoredBlocks | None = None) -> ir.Model:
    """A target's network whose weights are stored as the precision says; `blocks` are those of its source."""
    if blocks is None:
        return lower(network, precision)

    def parameter(constant: str) -> str:
        return constant.removeprefix("target.")

    def blocks_of(constant: str) -> Sequence[Sequence[BlockRows]] | None:
        return blocks.matrices(parameter(constant)) if parameter(constant) in blocks else None

    lowered = lower(network, Precision.bf16, blocks_of)
    if left := [name for name in lowered.graph.initializers if parameter(name) in blocks]:
        raise ValueError(f"no operator takes {left[0]} in blocks: choose another --precision")
    if blocks.unread:
        raise ValueError(f"the network has no {min(blocks.unread)}: choose another --precision")
    return lowered


def save(network: ir.Model, path: Path, constants: Constants) -> None:
    """Write a lowered network, whose programs' weights go to `constants`."""
    fused = fuse(network, constants)
    detach_constants(fused)
    _declare_bytes(fused)
    ir.save(fused, path)


def _declare_bytes(network: ir.Model) -> None:
    """Declare bfloat16 inputs, which are caches, as the bytes that they are: on a CPU without AVX-512 OpenVINO converts
    bfloat16 to float32, and an operator would update the copy."""
    for value in network.graph.inputs:
        if value.dtype == ir.DataType.BFLOAT16 and value.shape is not None:
            *outer, last = value.shape
            value.shape, value.dtype = ir.Shape([*outer, 2 * last]), ir.DataType.UINT8
