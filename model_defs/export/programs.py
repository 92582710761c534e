"""Exported programs of the target and the drafter, for the `torch` backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from redraft.model_defs.drafters.token_info import TokenInfoTable
from redraft.model_defs.export.drafter import DrafterInputs, Drafting, Resampling, resampling_examples
from redraft.model_defs.export.target import CacheShape, empty_caches
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.target.attention import HeadNorms, RopeTables
from redraft.model_defs.target.model import Target, add
from redraft.model_defs.target.shards import rank_join
from redraft.plugins.operators.all_reduce.torch_op import all_reduce
from redraft.plugins.operators.tree_attention.torch_op import tree_attention

Rewrite = Callable[[fx.GraphModule], fx.GraphModule]
"""Changes the module of an exported program, which is exported again then."""


class TorchTarget(nn.Module):
    """The target over ragged rows; attention is the torch operator, which updates the caches in place."""

    def __init__(self, target: Target, cache: CacheShape, features_output: bool, rank: int = 0, ranks: int = 1):
        super().__init__()
        self.target, self.features_output = target, features_output
        self.join = rank_join(rank, lambda x: all_reduce(x, ranks)) if ranks > 1 else add
        self.ropes = RopeTables(target.config, cache.rows, cache.max_len)

    def forward(self, input_ids: Tensor, rows: list[Tensor], logit_rows: Tensor, k: list[Tensor], v: list[Tensor]):
        config = self.target.config
        sizes = (config.num_heads, config.num_kv_heads, config.head_size)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            attributes = (*sizes, None, config.window_of(layer) or 0, *(norms or ()))
            return tree_attention(qkv, *rows, self.ropes.of(layer), k[layer], v[layer], *attributes)

        hidden, features = self.target(input_ids, attend, self.join, positions=rows[0])
        logits = self.target.lm_head(hidden[logit_rows])
        return (logits, features) if self.features_output else (logits,)


def export_target_torch(
    target: Target,
    cache: CacheShape,
    *,
    features_output: bool = True,
    rank: int = 0,
    ranks: int = 1,
    rewrite: Rewrite | None = None,
) -> ExportedProgram:
    """The target's program in the module's dtype, or one rank's of several: arguments input_ids, [positions,
    row_offsets, slots, cache_lengths, tree_mask, commit_src, commit_offsets], logit_rows, k caches, v caches; see
    `export_target_plugin` for shapes."""
    config, dtype = target.config, target.embedding.weight.dtype
    rows, sequences, bounds, commits = 5, 3, 4, 2
    t, b, b1, c, r = (Dim(name, min=1) for name in ("T", "B", "B1", "C", "R"))
    caches = [empty_caches(target, cache, cache.slots, dtype) for _ in "kv"]
    row_inputs = [(rows,), (bounds,), (sequences,), (sequences,), (rows, cache.mask_words), (commits,), (bounds,)]
    arguments = (_ints(rows), [_ints(*shape) for shape in row_inputs], _ints(6), *caches)
    fixed: list[dict] = [{}] * config.num_layers
    shapes = ({0: t}, [{0: t}, {0: b1}, {0: b}, {0: b}, {0: t}, {0: c}, {0: b1}], {0: r}, fixed, fixed)
    module = TorchTarget(target, cache, features_output, rank, ranks).eval()
    return _exported(module, arguments, shapes, rewrite)


def _exported(module: nn.Module, arguments: tuple, shapes: Any, rewrite: Rewrite | None) -> ExportedProgram:
    program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    if rewrite is None:
        return program
    return torch.export.export(rewrite(program.module(check_guards=False)), arguments, dynamic_shapes=shapes)


def in_precision(drafting: Drafting, dtype: torch.dtype) -> Drafting:
    """The same loop, whose drafter's weights, embeddings and head are now of this dtype; those that were shared are
    still. The rope table, which the kernels take in float32, and tables of token info keep theirs."""
    copies: dict[int, Tensor] = {}
    for module in drafting.modules():
        if isinstance(module, CacheTables | RopeTables | TokenInfoTable):
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point():
                copy = copies.setdefault(tensor.data_ptr(), tensor.detach().to(dtype))
                setattr(module, name, nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy)
    return drafting


def export_drafter_torch(drafting: Drafting, rewrite: Rewrite | None = None) -> ExportedProgram:
    """The drafter's program: weights and caches in the dtype of the loop's drafter, log-probabilities float32. Its one
    argument is the list of its network's inputs, see `DrafterInputs`."""
    inputs = DrafterInputs.of(drafting, next(drafting.parameters()).dtype)
    batch = Dim("B", min=1)
    sizes = {"B": batch, "B1": batch + 1, "P": Dim("P", min=1), "slots": Dim("slots", min=1)}
    shapes = [{axis: sizes[name] for axis, name in axes.items()} for axes in inputs.axes]
    return _exported(drafting.eval(), (inputs.examples,), (shapes,), rewrite)


def export_resampler_torch(drafting: BeamSearch, rewrite: Rewrite | None = None) -> ExportedProgram:
    """The program that re-samples from chains, with one argument: the list of `resampling_examples`."""
    examples, module = resampling_examples(drafting), Resampling(drafting).eval()
    del module.drafter  # what it looks up becomes constants; all else of the drafter stays out
    return _exported(module, (examples,), ([{0: Dim("B", min=1)}] * len(examples),), rewrite)


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
