"""A target split for tensor parallelism, Megatron-style: what each rank holds, and a target of its own for each.

Sharded are each layer's four matrices and the LM head: query, key and value projections by KV group (a KV head and the
query heads that read it), gate and up by the MLP's columns, the two matrices after them by their input features, the
LM head by the vocabulary. Of a mixture of experts, every rank holds columns of every expert. The embedding table (of
which a step reads a few rows), the router and the norms are on every rank. What the two output matrices of a layer give
are the ranks' parts of sums; their biases are rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm

import torch
from torch import Tensor, nn

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Join, Target, add, is_stand_in, stand_in
from redraft.model_defs.weights.blocks import StoredBlocks

PANEL = 32
"""Columns that kernels take together: shards begin at multiples of it where they can."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds, as ranges of the whole target's."""

    kv_heads: range
    mlp_columns: range
    vocabulary: range


def plan_shards(config: TargetConfig, ranks: int, unit: int = PANEL) -> tuple[Shard, ...]:
    """A shard for each rank. KV groups that do not divide go to the first ranks; the MLP's columns are shared out so
    that every rank holds as many weights of a layer as any other, and begin at multiples of `unit` where they can.
    Raises ValueError for more ranks than KV groups."""
    if not 1 <= ranks <= config.num_kv_heads:
        raise ValueError(
            f"{ranks} tensor-parallel ranks: expected 1 to {config.num_kv_heads}, the target's number of KV groups "
            "(each rank holds whole ones)"
        )
    groups, rest = divmod(config.num_kv_heads, ranks)
    kv_heads = [groups + (rank < rest) for rank in range(ranks)]
    queries_per_group = config.num_heads // config.num_kv_heads
    # Weights of a KV group over those of an MLP column: 2 (queries + 1) head_size hidden_size over 3 hidden_size, or 2
    # without a gate; of each expert as many.
    per_column = (3 if config.gated else 2) * (config.experts.count if config.experts else 1)
    columns_of_group = 2 * (queries_per_group + 1) * config.head_size / per_column
    share = (config.intermediate_size + config.num_kv_heads * columns_of_group) / ranks
    columns = [share - heads * columns_of_group for heads in kv_heads]
    even = [1.0] * ranks
    return tuple(
        Shard(*parts)
        for parts in zip(
            ranges([float(heads) for heads in kv_heads], config.num_kv_heads, 1),
            ranges(columns if min(columns) > 0 else even, config.intermediate_size, unit),
            ranges(even, config.vocab_size, PANEL),
            strict=True,
        )
    )


def ranges(shares: list[float], total: int, unit: int) -> Iterator[range]:
    """0 … total - 1 in consecutive ranges of about these shares, none empty, that begin at multiples of `unit` where
    that is possible. Raises ValueError for fewer than one each."""
    if total < len(shares):
        raise ValueError(f"{total} columns for {len(shares)} ranks: expected at least one for each")
    scale = total / sum(shares)
    for step in (unit, 1):
        bounds = [0, *(round(end * scale / step) * step for end in accumulate(shares[:-1])), total]
        if all(begin < end for begin, end in pairwise(bounds)):
            return (range(begin, end) for begin, end in pairwise(bounds))
    return ranges([1.0] * len(shares), total, 1)


def shards_of(target: Target, ranks: int) -> tuple[Shard, ...]:
    """`plan_shards` of a target, some of whose weights may be in blocks. Raises ValueError too where a part of one
    would not be whole groups of features."""
    if (blocks := _only_blocks(target)) is None:
        return plan_shards(target.config, ranks)
    down = [name for name, _ in target.named_parameters() if _kind(name) == "down" and name in blocks]
    plan = plan_shards(target.config, ranks, lcm(PANEL, *map(blocks.feature_step, down)))
    for shard in plan if ranks > 1 else ():
        try:
            shard_blocks(blocks, target, shard)
        except ValueError as error:
            raise ValueError(f"{error}: choose other ranks than {ranks}, or another precision than source") from None
    return plan


def shard_target(target: Target, shard: Shard) -> Target:
    """The target of one rank: with its heads and MLP columns, and an LM head of its part of the vocabulary. The hidden
    states that it gives are those of the whole target if its layers' outputs are joined with the other ranks' parts,
    see `rank_join`. Replicated weights are shared with `target`."""
    config = target.config
    group = config.num_heads // config.num_kv_heads
    rank_config = replace(
        config,
        num_heads=len(shard.kv_heads) * group,
        num_kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.mlp_columns),
        tie_embeddings=False,
    )
    with torch.device("meta"):
        part = Target(rank_config)
        part.lm_head = nn.Linear(config.hidden_size, len(shard.vocabulary), bias=False)
    part.load_state_dict(dict(shard_weights(target, shard)), assign=True)
    part.feature_readers = target.feature_readers
    if blocks := _only_blocks(target):
        part.blocks = shard_blocks(blocks, target, shard)
    return part.eval().requires_grad_(False)


def shard_weights(target: Target, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """The rank's weights under the target's names."""
    outputs, inputs = _rows(target.config, shard), _features(target.config, shard)
    for number, (name, weight) in enumerate(target.state_dict().items()):
        if name.startswith("feature_readers."):
            continue
        kind = _kind(name)
        if kind in outputs:
            yield name, _chosen(weight, max(weight.ndim - 2, 0), outputs[kind], number)
        elif kind in inputs and name.endswith(".bias"):
            yield name, weight if shard.kv_heads.start == 0 else torch.zeros_like(weight)
        elif kind in inputs:
            yield name, _chosen(weight, weight.ndim - 1, torch.tensor(inputs[kind]), number)
        else:
            yield name, weight


def shard_blocks(blocks: StoredBlocks, target: Target, shard: Shard) -> StoredBlocks:
    """The rank's weights in blocks. Raises ValueError where its features are not whole groups."""
    outputs, inputs = _rows(target.config, shard), _features(target.config, shard)
    names = {name: _kind(name) for name in target.state_dict()}
    rows = {name: outputs[kind].numpy() for name, kind in names.items() if kind in outputs}
    return blocks.part(rows, {name: inputs[kind] for name, kind in names.items() if kind in inputs})


def _only_blocks(target: Target) -> StoredBlocks | None:
    """A target's blocks, unless they are beside its weights in floats."""
    return target.blocks if any(map(is_stand_in, target.parameters())) else None


def _rows(config: TargetConfig, shard: Shard) -> dict[str, Tensor]:
    """The rank's rows, ascending, of each kind of weight whose outputs are split."""
    heads, kv_heads, queries = config.num_heads, config.num_kv_heads, _queries(config, shard)
    qkv = torch.cat(
        [
            _columns(part, config.head_size) + first * config.head_size
            for first, part in ((0, queries), (heads, shard.kv_heads), (heads + kv_heads, shard.kv_heads))
        ]
    )
    columns = _columns(shard.mlp_columns)
    gate_up = torch.cat([columns, columns + config.intermediate_size])
    return {"qkv": qkv, "gate_up": gate_up, "up": columns, "lm_head": _columns(shard.vocabulary)}


def _features(config: TargetConfig, shard: Shard) -> dict[str, range]:
    """The rank's features of each kind of weight whose inputs are split."""
    queries, size = _queries(config, shard), config.head_size
    return {"attention_out": range(queries.start * size, queries.stop * size), "down": shard.mlp_columns}


def _queries(config: TargetConfig, shard: Shard) -> range:
    """The rank's query heads."""
    group = config.num_heads // config.num_kv_heads
    return range(shard.kv_heads.start * group, shard.kv_heads.stop * group)


def _kind(name: str) -> str:
    """Which of a layer's weights one is: `qkv` of layers.0.qkv.weight."""
    return name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]


def _chosen(weight: Tensor, dim: int, index: Tensor, number: int) -> Tensor:
    """A weight's numbers at some places of a dimension; of one that stands for blocks another stand-in."""
    if not is_stand_in(weight):
        return weight.index_select(dim, index)
    return stand_in(number, (*weight.shape[:dim], len(index), *weight.shape[dim + 1 :]))


def rank_join(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Join:
    """A rank's `join` for `Target.forward`: rank 0 adds its part to the residual stream before the ranks' sum, which so
    is the new stream; the others give only their part."""

    def join(stream: Tensor | None, part: Tensor) -> Tensor:
        return all_reduce(add(stream, part) if rank == 0 else part)

    return join


def _columns(blocks: range, size: int = 1) -> Tensor:
    return torch.arange(blocks.start * size, blocks.stop * size)
