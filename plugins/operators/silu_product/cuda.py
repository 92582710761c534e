"""`SiluProduct` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

STEP = 8
"""Numbers that a thread makes"""
THREADS = 128

SILU_PRODUCT = Kernel(
    name="SiluProduct",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="silu_product",
    attributes=(),
    inputs=(Argument("gate_up", "bf16", ("rows", "both")),),
    scalars=("features",),
    outputs=(Argument("out", "bf16", ("rows", "features")),),
    grid=("rows", "blocks", "one"),
    threads=THREADS,
    derived={
        "one": lambda _: 1,
        "features": lambda n: n["both"] // 2,
        "blocks": lambda n: (n["features"] + STEP * THREADS - 1) // (STEP * THREADS),
    },
)


def silu_product(gate_up: Tensor) -> Tensor:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    both = gate_up.shape[-1]
    if both % (2 * STEP):
        raise ValueError(f"gate_up {tuple(gate_up.shape)}: expected a last size that is a multiple of {2 * STEP}")
    (out,) = run(SILU_PRODUCT, [gate_up.contiguous().flatten(0, -2)], {})
    return out.reshape(*gate_up.shape[:-1], both // 2)
