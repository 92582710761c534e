"""DFlash and DSpark: a block of masked positions, drafted at once over features of several of the target's layers.

A block is the root and masks. Its rows attend to each other, or to those before them, and in each layer to keys and
values of the fused features of all committed tokens. A row predicts the token in its own place, so the root's predicts
none (DFlash); or the one after it, so the root's does too (DSpark). DSpark's previous-token head adds to a row's logits
what the token before says: token info of low rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from redraft.model_defs.drafters.context_drafter import ChainDrafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.token_info import InfoForm, TokenInfoFactors
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.block import Block
from redraft.model_defs.loops.chains import ChainPaths
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.target.model import DecoderLayer, RMSNorm, Target


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a block drafter.

    `target_layers`: the layers of the target whose inputs it reads. `block_size`: rows of a block, the root's included.
    `mask_token`: what stands in the other rows. `from_root`: whether the root's row predicts a token too. `head`: the
    target's, or one of its own. `info_rank`: rank of the previous-token head, 0 without one. `causal`: whether a row
    sees no later row of its block. `window`: the longest context that it reads, None for any.
    """

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    target_layers: tuple[int, ...] = (0,)
    num_layers: int = 1
    block_size: int = 8
    mask_token: int = 0
    from_root: bool = False
    head: Literal["target", "own"] = "target"
    info_rank: int = 0
    causal: bool = False
    window: int | None = None
    layer: LayerShape | None = None


class BlockFuse(nn.Module):
    """What enters several layers, as one state after a norm: the target's network computes it."""

    def __init__(self, size: int, count: int, eps: float):
        super().__init__()
        self.fc = nn.Linear(count * size, size, bias=False)
        self.norm = RMSNorm(size, eps)

    def forward(self, layers: Tensor) -> Tensor:
        """[..., count * H] to [..., H]."""
        return self.norm(self.fc(layers))


class BlockDrafter(ChainDrafter):
    """Raw logits of all levels from one block; the context cache holds keys and values of features, and no states."""

    name = "block"
    config_type = BlockConfig
    is_trained = False
    info_forms = (InfoForm.low_rank,)
    info_form = InfoForm.low_rank
    config: BlockConfig

    def __init__(self, config: BlockConfig, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        count, size = target.config.num_layers, config.hidden_size
        self.feature_layers = config.target_layers
        if not all(0 <= layer <= count for layer in self.feature_layers):
            raise ValueError(f"the drafter reads layers {self.feature_layers}, the target has {count}")
        if not 0 <= config.mask_token < config.vocab_size:
            raise ValueError(f"the drafter's mask is token {config.mask_token} of {config.vocab_size}")
        if self.most_steps < 1:
            raise ValueError(f"the drafter has blocks of {config.block_size}, which draft nothing")
        shape = config.layer or LayerShape.of(target.config)
        self.layer_config = shape.config(size, config.vocab_size, config.num_layers)
        self.context_layers, self.block_size = config.num_layers, config.block_size
        self.block_rows = config.block_size * (1 if config.causal else 2)
        self.fuse = BlockFuse(size, len(self.feature_layers), shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(self.layer_config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, shape.rms_norm_eps)
        if config.head == "own":
            self.own_head = nn.Linear(size, len(self.hot_ids), bias=False)
        if config.info_rank:
            sizes = config.vocab_size, len(self.hot_ids)
            self.token_info = TokenInfoFactors(*(torch.zeros(count, config.info_rank) for count in sizes))

    @property
    def longest_context(self) -> int | None:
        return self.config.window

    @property
    def most_steps(self) -> int:
        return self.config.block_size - (not self.config.from_root)

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        self.require_steps(levels)
        super().prepare(cache_rows, levels, context)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> ChainPaths:
        """The roots: features [P, F], and the inputs of a DraftContext, whose tokens but the roots are not read."""
        context = operators.context(self.tables, inputs)
        block = context.place_block(self.config.block_size, mutual=not self.config.causal)
        states = self.states(self.own_features(features), context.roots, block)
        return self.chain_paths(
            operators, context, block.slice_rows(states, int(not self.config.from_root), self.levels)
        )

    def states(self, features: Tensor, roots: Tensor, block: Block) -> Tensor:
        """What the head reads [B * W, H] at all rows of the blocks of roots int32 [B], for features [P, H] of pairs."""
        masks = roots.new_full((1, self.config.block_size - 1), self.config.mask_token).expand(roots.shape[0], -1)
        x = self.embed(torch.cat([roots[:, None], masks], dim=1).flatten()).to(features.dtype)
        for index, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            # The pairs need keys and values only. Their queries, and what attention gives for them, are computed and
            # dropped: one matrix and one attention serve both, at some cost and no change of the result.
            qkv = layer.qkv(torch.cat([layer.attention_norm(x), features]))
            attended = block.own(block.attend(index, block.spread(qkv), layer.head_norms))
            x = x + layer.attention_out(attended)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x)

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        raise ValueError(f"drafters {self.name!r} are read from the hub and not trained here")
