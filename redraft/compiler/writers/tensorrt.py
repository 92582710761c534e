"""The writer of `tensorrt` and `tensorrt_rtx` bundles: networks, and the engines that TensorRT builds from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from redraft.bundle.config import BundleConfig
from redraft.compiler.calibration import Calibration
from redraft.compiler.passes import tensorrt_all_reduce, tensorrt_attention
from redraft.compiler.passes.quantization import FP8, INT4, QUANTIZED, Quantized, as_stored, quantize_network
from redraft.compiler.writers.engine_builder import EngineBuilder
from redraft.compiler.writers.shared import CALIBRATION, Loops, cache_shape, distinct, resampling_loop, target_parts
from redraft.console.output import err
from redraft.console.progress import step
from redraft.engines.tensorrt.engine import dtype_of
from redraft.model_defs.export.drafter import export_drafter_native, export_resampler_native
from redraft.model_defs.export.target import export_target_native, export_target_plugin
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.blocks import StoredBlocks


def write(config: BundleConfig, target: Target, loops: Loops, folder: Path, features: bool) -> dict[str, str]:
    """Write the networks and their engines to `folder`: the target in the form that the bundle asks for, all others in
    native form. Returns the versions for the manifest. Raises BundleError as `EngineBuilder` does."""
    builder = EngineBuilder(config)
    dtype, cache = dtype_of(builder.library, config.precision), cache_shape(config)
    for part in target_parts(config, target.in_dtype(dtype), folder):
        network, gives_features = part.folder / "target.onnx", features and part.rank == 0
        ranks = {"rank": part.rank, "ranks": config.tensor_parallel}
        with step(f"export {part.name}"):
            if config.plugin_form:
                form = export_target_plugin(
                    part.target, cache, cache_dtype=dtype, aliased_outputs=True, features_output=gives_features, **ranks
                )
                form = tensorrt_attention.tensorrt_form(quantized(form, config, target.blocks, folder), config.alias)
            else:
                form = export_target_native(part.target, cache, features_output=gives_features, **ranks)
                form = quantized(form, config, target.blocks, folder)
            save(tensorrt_all_reduce.tensorrt_form(form), network)
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
            with step(f"export the resampler of {names} and build the engine"):
                save(export_resampler_native(again), network)
                builder.build_drafter(network, reads_context=False)
    return builder.versions


def quantized(network: ir.Model, config: BundleConfig, blocks: StoredBlocks | None, folder: Path) -> ir.Model:
    """A target's network with quantized linear layers where the precision asks for them, calibrated by the file in the
    bundle's folder, or as `blocks` has them where TensorRT takes them so. Everything else keeps the network's dtype."""
    if config.precision not in QUANTIZED:
        return network
    largest_inputs = Calibration.load(folder / CALIBRATION).largest_inputs if config.precision == FP8 else None
    kept: set[str] = set()

    def stored(name: str, dtype: np.dtype) -> Quantized | None:
        parameter = f"{name}.weight"
        if blocks is None or config.tensor_parallel > 1 or parameter not in blocks:
            return None
        if (weight := as_stored(blocks.matrices(parameter)[0], dtype)) is not None:
            kept.add(name)
        return weight

    result = quantize_network(network, config.precision, largest_inputs, stored)
    if blocks is not None and config.precision == INT4:
        err.print(f"  {len(kept)} matrices keep the 4 bits of their source, the others are rounded anew", markup=False)
    return result


def save(network: ir.Model, path: Path) -> None:
    """Write a network with its weights beside it."""
    ir.save(network, path, external_data=f"{path.name}.data")
