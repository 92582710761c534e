"""`BeamStep` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

MOST = 2048
"""Candidates of a level, which lie in shared memory."""

_LEVELS = ("sequences", "levels", "width", "k")
_NEXT = ("sequences", "next", "width", "k")
BEAM_STEP = Kernel(
    name="BeamStep",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="beam_step",
    attributes=("width",),
    inputs=(
        *(Argument("values", "float32", ("rows", "k")), Argument("ids", "int32", ("rows", "k"))),
        *(Argument("candidates", "int32", _LEVELS), Argument("log_probs", "float32", _LEVELS)),
        *(Argument("parents", "int32", _LEVELS[:3]), Argument("expanded", "int32", ("sequences", "chosen"))),
    ),
    scalars=("nodes", "levels", "width", "k"),
    outputs=(
        *(Argument("next_candidates", "int32", _NEXT), Argument("next_log_probs", "float32", _NEXT)),
        *(Argument("next_parents", "int32", _NEXT[:3]), Argument("next_chosen", "int32", ("sequences", "width"))),
        *(Argument(name, "int32", ("expansions",)) for name in ("tokens", "origins")),
    ),
    grid=("sequences", "one", "one"),
    threads=128,
    derived={
        "one": lambda _: 1,
        "nodes": lambda n: n["rows"] // n.most(n["sequences"], 1),
        "next": lambda n: n["levels"] + 1,
        "expansions": lambda n: n["sequences"] * n["width"],
    },
)


def beam_step(values: Tensor, ids: Tensor, width: int, draft: list[Tensor]) -> list[Tensor]:
    """See README.md; `draft` has the first four results of the step before, or none. Nothing waits for the GPU and
    sizes follow from shapes, so that a CUDA graph can hold it. Raises ValueError for tensors that do not fit."""
    rows, k = values.shape
    if not draft:
        draft = [
            *(ids.new_empty(rows, 0, width, k), values.new_empty(rows, 0, width, k)),
            *(ids.new_empty(rows, 0, width), ids.new_empty(rows, 0)),
        ]
    nodes = rows // max(len(draft[0]), 1)
    if width * k > MOST or nodes * k < width or len(draft[0]) * nodes != rows:
        raise ValueError(
            f"width {width} of {rows} rows of {k} candidates for {len(draft[0])} sequences: expected as many rows for "
            f"each, with at least {width} candidates, and at most {MOST} a level"
        )
    return run(BEAM_STEP, [tensor.contiguous() for tensor in (values, ids, *draft)], {"width": width})
