"""`BeamStep` as a torch operator, `torch.ops.redraft.beam_step`, for exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.beam_step import cuda, reference

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("redraft::beam_step", mutates_args=())
def _beam_step(values: Tensor, ids: Tensor, width: int, draft: list[Tensor]) -> Results:
    results = reference.beam_step(values, ids, width, *draft)
    # An operator's results never share memory with its inputs.
    candidates, log_probs, parents, chosen, tokens, origins = (result.clone() for result in results)
    return candidates, log_probs, parents, chosen, tokens, origins


@_beam_step.register_fake
def _(values: Tensor, ids: Tensor, width: int, draft: list[Tensor]) -> Results:
    batch, levels = (draft[0].shape[0], draft[0].shape[1]) if draft else (values.shape[0], 0)
    level, nodes = (batch, levels + 1, width), (batch * width,)
    candidates, log_probs = (x.new_empty(*level, values.shape[1]) for x in (ids, values))
    tokens, origins = ids.new_empty(nodes), ids.new_empty(nodes)
    return candidates, log_probs, ids.new_empty(level), ids.new_empty(batch, width), tokens, origins


@_beam_step.register_kernel("cuda")
def _(values: Tensor, ids: Tensor, width: int, draft: list[Tensor]) -> Results:
    candidates, log_probs, parents, chosen, tokens, origins = cuda.beam_step(values, ids, width, draft)
    return candidates, log_probs, parents, chosen, tokens, origins


def beam_step(values: Tensor, ids: Tensor, width: int, *draft: Tensor) -> tuple[Tensor, ...]:
    """See README.md and `reference.beam_step`; one node of a program. On a GPU by the CUDA kernel."""
    return _beam_step(values, ids, width, list(draft))
