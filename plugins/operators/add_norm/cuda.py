"""`AddNorm` and `AddNormQuantized` by the kernels of kernel.cu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.fp8_linear.reference import STEP as QUANTIZED_STEP
from redraft.plugins.operators.tree_attention.cuda_kernels import eps_bits

STEP = 8
"""Numbers that a thread loads at a time"""

ADD_NORM = Kernel(
    name="AddNorm",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="add_norm",
    attributes=("eps",),
    inputs=(
        *(Argument(name, "bf16", ("rows", "features")) for name in ("x", "part")),
        Argument("weight", "bf16", ("features",)),
    ),
    scalars=("features", "eps"),
    outputs=tuple(Argument(name, "bf16", ("rows", "features")) for name in ("total", "normed")),
    grid=("rows", "one", "one"),
    threads=128,
    derived={"one": lambda _: 1},
)
ADD_NORM_QUANTIZED = replace(
    ADD_NORM,
    name="AddNormQuantized",
    entry="add_norm_quantized",
    outputs=(
        *(Argument("total", "bf16", ("rows", "features")), Argument("codes", "e4m3", ("rows", "features"))),
        Argument("scale", "float32", ("rows",)),
    ),
)


def add_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    total, normed = _run(ADD_NORM, x, part, weight, eps, STEP)
    return total.reshape(x.shape), normed.reshape(x.shape)


def add_norm_quantized(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See README.md and `add_norm`."""
    total, codes, scale = _run(ADD_NORM_QUANTIZED, x, part, weight, eps, QUANTIZED_STEP)
    return total.reshape(x.shape), codes.reshape(x.shape), scale.reshape(x.shape[:-1])


def _run(kernel: Kernel, x: Tensor, part: Tensor, weight: Tensor, eps: float, step: int) -> list[Tensor]:
    if x.shape[-1] % step:
        raise ValueError(f"x {tuple(x.shape)}: expected a last size that is a multiple of {step}")
    rows = [tensor.contiguous().flatten(0, -2) for tensor in (x, part)]
    return run(kernel, [*rows, weight.contiguous()], {"eps": eps_bits(eps)})
