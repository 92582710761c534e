"""`PerturbedTopK` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

MOST = 1024
"""Tokens of a node, which lie in shared memory."""

PERTURBED_TOPK = Kernel(
    name="PerturbedTopK",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="perturbed_topk",
    attributes=("level", "k"),
    inputs=(
        *(Argument("values", "float32", ("rows", "m")), Argument("ids", "int32", ("rows", "m"))),
        *(Argument("seeds", "int32", ("sequences", "two")), Argument("positions", "int32", ("sequences",))),
        *(Argument("temperature", "float32", ("sequences",)), Argument("top_k", "int32", ("sequences",))),
        *(Argument(name, "float32", ("sequences",)) for name in ("top_p", "sharpness")),
    ),
    scalars=("rows", "m", "sequences", "level", "k"),
    outputs=(Argument("next_values", "float32", ("rows", "k")), Argument("next_ids", "int32", ("rows", "k"))),
    grid=("rows", "one", "one"),
    threads=128,
    derived={"one": lambda _: 1},
)


def perturbed_topk(values: Tensor, ids: Tensor, *noise: Tensor, level: int, k: int) -> tuple[Tensor, Tensor]:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for more than MOST tokens of a node, and tensors that do not fit."""
    if values.shape[1] > MOST or not 1 <= k <= values.shape[1]:
        raise ValueError(f"the {k} best of {values.shape[1]} tokens: expected 1 or more of at most {MOST}")
    arguments = [tensor.contiguous() for tensor in (values.float(), ids, *noise)]
    best, chosen = run(PERTURBED_TOPK, arguments, {"level": level, "k": k})
    return best, chosen
