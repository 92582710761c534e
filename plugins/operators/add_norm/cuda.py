"""`AddNorm` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run
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


def add_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    if x.shape[-1] % STEP:
        raise ValueError(f"x {tuple(x.shape)}: expected a last size that is a multiple of {STEP}")
    rows = [tensor.contiguous().flatten(0, -2) for tensor in (x, part)]
    total, normed = run(ADD_NORM, [*rows, weight.contiguous()], {"eps": eps_bits(eps)})
    return total.reshape(x.shape), normed.reshape(x.shape)
