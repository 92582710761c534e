"""`Fp8Linear` by the kernel of kernel.cu and torch's product, which is `Fp8Product`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.fp8_linear.reference import BF16, check, check_codes

QUANTIZE_ROWS = Kernel(
    name="QuantizeRows",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="quantize_rows",
    attributes=(),
    inputs=(Argument("x", "bf16", ("rows", "features")),),
    scalars=("features",),
    outputs=(Argument("codes", "e4m3", ("rows", "features")), Argument("scale", "float32", ("rows",))),
    grid=("rows", "one", "one"),
    threads=128,
    derived={"one": lambda _: 1},
)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    check(x, weight, scale, bias)
    codes, row_scale = run(QUANTIZE_ROWS, [x.contiguous().flatten(0, -2)], {})
    return fp8_product(codes.reshape(x.shape), row_scale.reshape(x.shape[:-1]), weight, scale, bias)


def fp8_product(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md and `fp8_linear`."""
    check_codes(codes, row_scale, weight, scale, bias)
    out = torch._scaled_mm(
        codes.flatten(0, -2),
        weight.T,
        scale_a=row_scale.reshape(-1, 1),
        scale_b=scale.unsqueeze(0),
        bias=bias,
        out_dtype=BF16,
        use_fast_accum=True,
    )
    return out.unflatten(0, codes.shape[:-1])
