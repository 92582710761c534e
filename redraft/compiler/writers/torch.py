"""The writer of `torch` bundles: exported programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, fx

from redraft.bundle.backends import Precision
from redraft.bundle.config import BundleConfig
from redraft.compiler.passes import fewer_kernels, float8
from redraft.compiler.writers.shared import Loops, cache_shape, distinct, resampling_loop, target_parts
from redraft.console.progress import step
from redraft.model_defs.export.programs import (
    export_drafter_torch,
    export_resampler_torch,
    export_target_torch,
    in_precision,
)
from redraft.model_defs.target.model import Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What a precision stores that is not quantized, and computes in"""


def write(config: BundleConfig, target: Target, loops: Loops, folder: Path, features: bool) -> dict[str, str]:
    """Write the programs to `folder`. Returns no versions: every manifest has torch's."""
    dtype = DTYPES[config.precision]
    rewrite = None if config.precision == Precision.fp32 else partial(rewritten, config.precision)
    scales = {f"target.{name}": scale for name, scale in target.row_scales.items()}
    for part in target_parts(config, target.in_dtype(dtype), folder):
        with step(f"export {part.name}"):
            program = export_target_torch(
                part.target,
                cache_shape(config),
                features_output=features and part.rank == 0,
                rank=part.rank,
                ranks=config.tensor_parallel,
                rewrite=partial(rewrite, scales=scales) if rewrite else None,
            )
            save(program, part.folder / "target.pt2")
    for name, names, loop in distinct(loops, folder):
        with step(f"export {names}"):
            save(export_drafter_torch(in_precision(loop, dtype), rewrite), folder / f"drafter.{name}.pt2")
            if again := resampling_loop(config, name, loop):
                save(export_resampler_torch(again, rewrite), folder / f"resampler.{name}.pt2")
    return {}


def rewritten(
    precision: Precision, module: fx.GraphModule, scales: Mapping[str, Tensor | None] | None = None
) -> fx.GraphModule:
    """A program's module as kernels for bf16 compute it and, for fp8, with its matrices in E4M3."""
    module = fewer_kernels.fuse(module)
    return float8.quantize(module, scales) if precision == Precision.fp8 else module


def save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program without the inputs that it was exported with: caches are as large as the limits ask."""
    program.example_inputs = None
    torch.export.save(program, path)
