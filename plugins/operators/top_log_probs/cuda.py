"""`TopLogProbs` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

MOST = 1024
"""Tokens that are chosen of a row at most: they lie in shared memory"""

TOP_LOG_PROBS = Kernel(
    name="TopLogProbs",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="top_log_probs",
    attributes=("k",),
    inputs=(Argument("logits", "bf16", ("rows", "vocabulary")), Argument("ids", "int32", ("vocabulary",))),
    scalars=("vocabulary", "k"),
    outputs=(Argument("log_probs", "float32", ("rows", "k")), Argument("tokens", "int32", ("rows", "k"))),
    grid=("rows", "one", "one"),
    threads=512,
    derived={"one": lambda _: 1},
)


def top_log_probs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See README.md. Nothing waits for the GPU and sizes follow from shapes, so that a CUDA graph can hold it. Raises
    ValueError for tensors that do not fit."""
    if not 1 <= k <= min(logits.shape[-1], MOST):
        raise ValueError(f"the {k} best of {logits.shape[-1]} columns: expected 1 or more, at most {MOST}")
    log_probs, tokens = run(TOP_LOG_PROBS, [logits.contiguous(), ids.contiguous()], {"k": k})
    return log_probs, tokens
