"""`DraftRows` by the kernel of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

THREADS = 128

DRAFT_ROWS = Kernel(
    name="DraftRows",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="draft_rows",
    attributes=("level", "first", "width", "words"),
    inputs=(
        *(Argument("contexts", "int32", ("sequences",)), Argument("origins", "int32", ("grown",))),
        Argument("mask_before", "int32", ("rows_before", "words_before")),
    ),
    scalars=("sequences", "level", "first", "width", "words", "rows_before", "words_before"),
    outputs=(
        *(Argument("positions", "int32", ("rows",)), Argument("row_offsets", "int32", ("bounds",))),
        *(Argument("tree_mask", "int32", ("rows", "words")), Argument("starts", "int32", ("sequences",))),
    ),
    grid=("blocks", "one", "one"),
    threads=THREADS,
    derived={
        "one": lambda _: 1,
        "rows": lambda n: n["sequences"] * n["width"],
        "bounds": lambda n: n["sequences"] + 1,
        "blocks": lambda n: (n["rows"] + n["bounds"] + THREADS - 1) // THREADS,
    },
)


def draft_rows(contexts: Tensor, grown: list[Tensor], level: int, first: int, width: int, words: int) -> list[Tensor]:
    """See README.md; `grown` has origins and the mask of the level before, or nothing. Nothing waits for the GPU and
    sizes follow from shapes, so that a CUDA graph can hold it. Raises ValueError for tensors that do not fit."""
    origins, mask = grown or (contexts.new_empty(0), contexts.new_empty(0, 0))
    if grown and (len(origins) != len(contexts) * width or mask.shape[1] > words or not len(mask)):
        raise ValueError(
            f"origins of {len(origins)} rows and a mask {tuple(mask.shape)}: expected {len(contexts)} x {width} rows "
            f"and at most {words} words"
        )
    attributes = {"level": level, "first": first, "width": width, "words": words}
    return run(DRAFT_ROWS, [tensor.contiguous() for tensor in (contexts, origins, mask)], attributes)
