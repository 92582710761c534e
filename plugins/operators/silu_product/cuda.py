"""`SiluProduct` and `SiluProductQuantized` by the kernels of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.fp8_linear.reference import STEP as QUANTIZED_STEP

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
SILU_PRODUCT_QUANTIZED = Kernel(
    name="SiluProductQuantized",
    source=SILU_PRODUCT.source,
    entry="silu_product_quantized",
    attributes=(),
    inputs=SILU_PRODUCT.inputs,
    scalars=("features",),
    outputs=(Argument("codes", "e4m3", ("rows", "features")), Argument("scale", "float32", ("rows",))),
    grid=("rows", "one", "one"),
    threads=512,
    derived={name: SILU_PRODUCT.derived[name] for name in ("one", "features")},
)


def silu_product(gate_up: Tensor) -> Tensor:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    (out,) = _run(SILU_PRODUCT, gate_up, STEP)
    return out.reshape(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def silu_product_quantized(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """See README.md and `silu_product`."""
    codes, scale = _run(SILU_PRODUCT_QUANTIZED, gate_up, QUANTIZED_STEP)
    return codes.reshape(*gate_up.shape[:-1], gate_up.shape[-1] // 2), scale.reshape(gate_up.shape[:-1])


def _run(kernel: Kernel, gate_up: Tensor, step: int) -> list[Tensor]:
    if gate_up.shape[-1] % (2 * step):
        raise ValueError(f"gate_up {tuple(gate_up.shape)}: expected a last size that is a multiple of {2 * step}")
    return run(kernel, [gate_up.contiguous().flatten(0, -2)], {})
