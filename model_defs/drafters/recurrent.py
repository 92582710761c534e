"""ReDrafter's recurrent drafter (ReDrafter, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Drafter, Recipe, ridge
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.loops.paths import Children
from redraft.model_defs.target.model import Target

if TYPE_CHECKING:
    from redraft.model_defs.drafters.hub.folder import HubTensors


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent drafter.

    `initial_state`: "embedding" is the paper's s_1 = e_1; "zero" is Apple's released code,
    s_1 = f(W e_1 + b). `head`: "own" is the paper's softmax layer, which is trained; "target" projects onto the
    target's frozen LM-head rows. `hot_vocabulary`: rows of the head, or None for all tokens.
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int = 1024
    num_blocks: int = 3
    initial_state: Literal["embedding", "zero"] = "embedding"
    head: Literal["own", "target"] = "target"
    hot_vocabulary: int | None = None
    rnn_bias: bool = True


class ResidualBlock(nn.Module):
    """x + silu(W x + b), the identity when new."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class RecurrentPaths:
    """Nodes by their states [N, H] and `context` [N, exit_dim]; `roots` [B, exit_dim] is their roots' context, None
    where they are the roots."""

    drafter: RecurrentDrafter
    state: Tensor
    context: Tensor
    roots: Tensor | None = None
    raw_logits: None = None

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        return self.drafter.most_likely(self.drafter.hidden(self.state, self.context), count)

    def extend(self, children: Children) -> RecurrentPaths:
        roots = self.context if self.roots is None else self.roots
        state = self.drafter.next_state(F.embedding(children.origins, self.state), children.tokens)
        return RecurrentPaths(self.drafter, state, F.embedding(children.sequences, roots), roots)


class RecurrentDrafter(Drafter):
    """p(next token | path) from the target's features h and the path's embeddings:
    s_t = f(U s_{t-1} + W e_t + b), logits = head(blocks(input([s_t, h]))).

    The input layer's part of h is the same for all paths from a root: see `context`."""

    name = "recurrent"
    config_type = RecurrentConfig
    recipe = Recipe(peak_rate=7e-4)
    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        hidden = config.hidden_size
        self.rnn_u = nn.Linear(hidden, hidden, bias=config.rnn_bias)
        self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.input = nn.Linear(2 * hidden, config.exit_dim)
        self.blocks = nn.ModuleList(ResidualBlock(config.exit_dim) for _ in range(config.num_blocks))
        if config.head == "target":
            self.output = nn.Linear(config.exit_dim, hidden, bias=False)
        else:
            self.own_head = nn.Linear(config.exit_dim, len(self.hot_ids), bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).to(self.rnn_w.weight.dtype)

    def first_state(self, tokens: Tensor) -> Tensor:
        """s_1 [..., H] of the root tokens int [...]."""
        e = self.embed(tokens)
        if self.config.initial_state == "embedding":
            return e
        return F.silu(F.linear(e, self.rnn_w.weight, self.rnn_u.bias))

    def next_state(self, state: Tensor, tokens: Tensor) -> Tensor:
        """s_t [..., H] from s_{t-1} [..., H] and tokens int [...]."""
        return F.silu(self.rnn_u(state) + self.rnn_w(self.embed(tokens)))

    def context(self, features: Tensor) -> Tensor:
        """[..., exit_dim], the input layer's output for h [..., F] and a state of zeros."""
        return F.linear(features, self.input.weight[:, self.config.hidden_size :], self.input.bias)

    def hidden(self, state: Tensor, context: Tensor) -> Tensor:
        """What the head reads: [..., H] (head "target") or [..., exit_dim] (head "own")."""
        x = F.linear(state, self.input.weight[:, : self.config.hidden_size]) + context
        for block in self.blocks:
            x = block(x)
        return self.output(x) if self.config.head == "target" else x

    def logits(self, state: Tensor, features: Tensor) -> Tensor:
        """[..., K] over the head's rows; `hot_ids` maps them to the target's ids."""
        return F.linear(self.hidden(state, self.context(features)), self.head_weight.to(state.dtype))

    def paths(self, operators: Operators, features: Tensor, tokens: Tensor) -> RecurrentPaths:
        """The roots: features [B, F] of the tokens before them, and tokens int32 [B]."""
        return RecurrentPaths(self, self.first_state(tokens), self.context(self.own_features(features)))

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        context = self.context(windows.rows(self.features_of(windows), kept[0], 0).flatten(0, 1)).unflatten(
            0, (-1, kept[0])
        )
        for depth, here in enumerate(kept):
            tokens = windows.rows(windows.tokens, here, depth + 1).flatten()
            if depth == 0:
                state = self.first_state(tokens)
            else:
                state = self.next_state(state.unflatten(0, (-1, kept[depth - 1]))[:, :here].flatten(0, 1), tokens)
            yield self.hidden(state, context[:, :here].flatten(0, 1))

    @torch.no_grad()
    def initialize(self, target: Target, windows: Windows) -> None:
        """Set input and output layers to map [embedding, h] to the next hidden state, by ridge regression. Where the
        layer between them is narrower, they hold the map's largest singular values. A head of its own starts as the
        output layer and the target's rows in one matrix."""
        size, kept = min(self.config.hidden_size, self.config.exit_dim), windows.positions.shape[1]
        scored = windows.scored(kept, 0)
        here, there, tokens = (
            windows.rows(x, kept, ahead)[scored]
            for x, ahead in ((windows.hidden, 0), (windows.hidden, 1), (windows.tokens, 1))
        )
        weight = ridge(torch.cat([self.embed(tokens).float(), here.float()], dim=-1), there.float())
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        self.input.weight[:size] = s[:size, None].sqrt() * vt[:size]
        self.input.bias.zero_()
        output = F.pad(u[:, :size] * s[:size].sqrt(), (0, self.config.exit_dim - size))
        if self.config.head == "target":
            self.output.weight.copy_(output)
        else:
            self.own_head.weight.copy_(self.head_rows.float() @ output)


def from_apple(
    raw: dict[str, Any], weights: Mapping[str, Tensor] | HubTensors
) -> tuple[RecurrentConfig, dict[str, Tensor]]:
    """Translate Apple's ReDrafter checkpoint: its head input is [h, s] where the paper's is [s, h], its
    state starts from zero, and without `input_proj` the input is the identity."""
    if not raw.get("rnn", False):
        raise ValueError("this checkpoint has rnn false: heads without recurrence are not a recurrent drafter")
    hidden, exit_dim, blocks = raw["hidden_size"], raw["exit_dim"], raw["num_draft_layers"]
    if "input_proj.weight" in weights:
        projection, bias = weights["input_proj.weight"], weights["input_proj.bias"]
    elif exit_dim == 2 * hidden:
        projection, bias = torch.eye(exit_dim), torch.zeros(exit_dim)
    else:
        raise ValueError(
            f"the tensor input_proj.weight is missing, which is needed where exit_dim, {exit_dim}, is not twice "
            f"hidden_size, {hidden}"
        )
    out = {
        "rnn_u.weight": weights["rnn_u.weight"],
        "rnn_w.weight": weights["rnn_w.weight"],
        "input.weight": torch.cat([projection[:, hidden:], projection[:, :hidden]], dim=1),
        "input.bias": bias,
        "own_head.weight": weights[f"lm_head.{blocks}.weight"],
    }
    if "rnn_u.bias" in weights:
        out["rnn_u.bias"] = weights["rnn_u.bias"]
    for i in range(blocks):
        out[f"blocks.{i}.linear.weight"] = weights[f"lm_head.{i}.linear.weight"]
        out[f"blocks.{i}.linear.bias"] = weights[f"lm_head.{i}.linear.bias"]
    config = RecurrentConfig(
        hidden, raw["vocab_size"], exit_dim, blocks, "zero", "own", None, rnn_bias="rnn_u.bias" in out
    )
    return config, out
