"""A baseline: speculative sampling with a separate draft LM, a small Llama that shares the target's embeddings or any
other model of the target's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Drafter, Recipe
from redraft.model_defs.drafters.window_attention import WindowAttention
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.context_cache import CacheTables, TreePaths
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.target.model import Attend, DecoderLayer, Target, copy_weights, norm_of


@dataclass(frozen=True)
class DraftLMConfig:
    """Shape of a draft LM: `num_layers` of the target's layers."""

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    num_layers: int = 2


class DraftLM(Drafter):
    """A draft model that reads only the text, not the target's features.

    Its logits at a token do not depend on where drafting began, so it is trained at depth 0 only.
    """

    name = "draft_lm"
    config_type = DraftLMConfig
    recipe = Recipe(peak_rate=1e-3, window=256, batch=4, depth_shares=(1.0, 0.0))
    reads_context = True
    reads_text = True
    config: DraftLMConfig
    tables: CacheTables
    positions: nn.Embedding
    position_rows: Tensor

    def __init__(
        self,
        config: DraftLMConfig,
        target: Target,
        hot_ids: Tensor | None = None,
        layers: nn.ModuleList | None = None,
    ):
        """See `Drafter`. `layers` None: random ones."""
        super().__init__(config, target, hot_ids)
        self.lm_config = target.config.for_layers(config.num_layers) if layers is None else target.config
        self.context_layers = config.num_layers
        self.layers = layers or nn.ModuleList(DecoderLayer(self.lm_config) for _ in range(config.num_layers))
        self.norm = norm_of(target.config)

    @classmethod
    def of_model(cls, model: Target, target: Target, hot_ids: Tensor | None = None) -> Self:
        """Make a drafter of a whole model, with embeddings, head and layers of its own.

        Raises ValueError where its vocabulary has another size than the target's.
        """
        model_config = model.config
        if model_config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"a draft LM needs the target's vocabulary of {target.config.vocab_size}, "
                f"this one has {model_config.vocab_size}"
            )
        rows = None if hot_ids is None else len(hot_ids)
        config = DraftLMConfig(model_config.hidden_size, model_config.vocab_size, rows, model_config.num_layers)
        drafter = cls(config, model, hot_ids, model.layers)
        drafter.norm, drafter.feature_size = model.norm, target.config.hidden_size
        if model_config.learned_positions:
            drafter.positions = model.positions
        return drafter.eval()

    @property
    def longest_context(self) -> int | None:
        return self.lm_config.max_position

    def forward(
        self, tokens: Tensor, attend: Attend, rows: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """What the head reads [..., H] after tokens int [...]; with `rows`, only after these. A model with learned
        positions reads those of the tokens int [...]."""
        x = self.embed(tokens)
        if self.lm_config.embedding_scale != 1.0:
            x = x * self.lm_config.embedding_scale
        if self.lm_config.learned_positions:
            assert positions is not None
            x = x + F.embedding(positions, self.position_rows)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend, rows if index + 1 == len(self.layers) else None)
        return self.norm(x)

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        self.tables = CacheTables(self.lm_config, cache_rows, context, self.embedding.device)
        if self.lm_config.learned_positions:  # drafted nodes may stand beyond the last one
            positions = torch.arange(cache_rows).clamp(max=self.lm_config.max_position - 1)
            self.register_buffer("position_rows", self.positions.weight.detach()[positions], persistent=False)

    def read(self, state: Tensor) -> Tensor:
        """See `Grower.read`."""
        return state

    def grow(self, state: Tensor, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        """See `Grower.grow`."""
        return self(tokens, attend, positions=positions)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> TreePaths:
        """The roots, from the inputs of a DraftContext, whose pairs begin with the text's first token; features [P, F]
        are not read."""
        context = operators.context(self.tables, inputs)
        state = self(inputs[0], context.attend_pairs, context.last_rows, context.pair_positions)
        return TreePaths(self, context, state)

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        attention = WindowAttention(self.lm_config, windows.documents)
        hidden = self(windows.tokens.flatten(), attention.attend_context).unflatten(0, windows.tokens.shape)
        for depth, here in enumerate(kept):
            yield windows.rows(hidden, here, depth + 1).flatten(0, 1)

    @torch.no_grad()
    def initialize(self, target: Target, windows: Windows) -> None:
        """Copy the target's first layers, its last layer and its norm."""
        sources = [*list(target.layers)[: self.config.num_layers - 1], target.layers[-1]]
        for layer, source in zip(self.layers, sources, strict=True):
            copy_weights(layer, source)
        self.norm.load_state_dict(target.norm.state_dict())
