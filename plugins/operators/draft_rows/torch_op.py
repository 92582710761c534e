"""`DraftRows` as a torch operator, `torch.ops.redraft.draft_rows`, for exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.draft_rows import cuda, reference

Results = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("redraft::draft_rows", mutates_args=())
def _draft_rows(contexts: Tensor, grown: list[Tensor], level: int, first: int, width: int, words: int) -> Results:
    rows = reference.draft_rows(contexts, *grown, level=level, first=first, width=width, words=words)
    # An operator's results never share memory with its inputs.
    positions, row_offsets, tree_mask, starts = (result.clone() for result in rows)
    return positions, row_offsets, tree_mask, starts


@_draft_rows.register_fake
def _(contexts: Tensor, grown: list[Tensor], level: int, first: int, width: int, words: int) -> Results:
    batch, empty = contexts.shape[0], contexts.new_empty
    return empty(batch * width), empty(batch + 1), empty(batch * width, words), empty(batch)


@_draft_rows.register_kernel("cuda")
def _(contexts: Tensor, grown: list[Tensor], level: int, first: int, width: int, words: int) -> Results:
    positions, row_offsets, tree_mask, starts = cuda.draft_rows(contexts, grown, level, first, width, words)
    return positions, row_offsets, tree_mask, starts


def draft_rows(contexts: Tensor, *grown: Tensor, level: int, first: int, width: int, words: int) -> tuple[Tensor, ...]:
    """See README.md and `reference.draft_rows`; one node of a program. On a GPU by the CUDA kernel."""
    return _draft_rows(contexts, list(grown), level, first, width, words)
