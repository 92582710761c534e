"""ReDrafter's recurrent drafter (ReDrafter, section 3.1) and its unrolled beam search (3.2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model_defs.target import Target
from plugins.beam_step.reference import beam_step


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent drafter.

    `initial_state`: "embedding" is the paper's s_1 = e_1; "zero" is Apple's released code,
    s_1 = f(W e_1 + b). `head`: "own" is the paper's softmax layer; "target" projects onto the target's
    frozen LM-head rows. `hot_vocabulary`: rows of the head, or None for all tokens.
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_blocks: int
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


class RecurrentDrafter(nn.Module):
    """p(next token | path) from the target's last hidden state h and the path's embeddings:
    s_t = f(U s_{t-1} + W e_t + b), logits = head(blocks(input([s_t, h]))).

    The input layer's part of h is the same for all paths from a root: see `context`."""

    hot_ids: Tensor
    embedding: Tensor
    head_rows: Tensor

    def __init__(self, config: RecurrentConfig, target: Target, hot_ids: Tensor | None = None):
        """`hot_ids` int [K] ascending target ids of the head's rows; None is the whole vocabulary."""
        super().__init__()
        hidden = config.hidden_size
        rows = config.hot_vocabulary or config.vocab_size
        if (target.config.hidden_size, target.config.vocab_size) != (hidden, config.vocab_size):
            raise ValueError(
                f"the drafter was made for a target of hidden size {hidden} and vocabulary {config.vocab_size}; "
                f"this one has {target.config.hidden_size} and {target.config.vocab_size}"
            )
        self.config = config
        self.rnn_u = nn.Linear(hidden, hidden, bias=config.rnn_bias)
        self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.input = nn.Linear(2 * hidden, config.exit_dim)
        self.blocks = nn.ModuleList(ResidualBlock(config.exit_dim) for _ in range(config.num_blocks))
        if config.head == "target":
            self.output = nn.Linear(config.exit_dim, hidden, bias=False)
        else:
            self.own_head = nn.Linear(config.exit_dim, rows, bias=False)
        ids = torch.arange(rows) if hot_ids is None else hot_ids.long()
        if ids.shape != (rows,):
            raise ValueError(f"hot_ids has shape {tuple(ids.shape)}, expected ({rows},)")
        self.register_buffer("hot_ids", ids, persistent=False)
        self.register_buffer("embedding", target.embedding.weight.detach(), persistent=False)
        self.register_buffer("head_rows", target.lm_head.weight.detach()[ids], persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.rnn_w.weight.dtype)

    def first_state(self, tokens: Tensor) -> Tensor:
        """s_1 [..., H] of the root tokens int [...]."""
        e = self.embed(tokens)
        if self.config.initial_state == "embedding":
            return e
        return F.silu(F.linear(e, self.rnn_w.weight, self.rnn_u.bias))

    def next_state(self, state: Tensor, tokens: Tensor) -> Tensor:
        """s_t [..., H] from s_{t-1} [..., H] and tokens int [...]."""
        return F.silu(self.rnn_u(state) + self.rnn_w(self.embed(tokens)))

    def context(self, hidden: Tensor) -> Tensor:
        """[..., exit_dim], the input layer's output for h [..., H] and a state of zeros."""
        return F.linear(hidden, self.input.weight[:, self.config.hidden_size :], self.input.bias)

    def features(self, state: Tensor, context: Tensor) -> Tensor:
        """What the head takes: [..., H] (head "target") or [..., exit_dim] (head "own")."""
        x = F.linear(state, self.input.weight[:, : self.config.hidden_size]) + context
        for block in self.blocks:
            x = block(x)
        return self.output(x) if self.config.head == "target" else x

    @property
    def head_weight(self) -> Tensor:
        return self.head_rows if self.config.head == "target" else self.own_head.weight

    def logits(self, state: Tensor, hidden: Tensor) -> Tensor:
        """[..., K] over the head's rows; `hot_ids` maps them to the target's ids."""
        return F.linear(self.features(state, self.context(hidden)), self.head_weight.to(state.dtype))

    def likeliest(self, state: Tensor, context: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [..., count], descending, and target ids int32 of the likeliest next tokens."""
        features = self.features(state, context)
        scores = F.log_softmax(F.linear(features, self.head_weight.to(features.dtype)), dim=-1)
        values, rows = scores.topk(count, dim=-1)
        return values, self.hot_ids[rows].to(torch.int32)

    def save(self, folder: Path, card: dict[str, Any] | None = None) -> None:
        """Write `config.json` and `drafter.safetensors` (bfloat16)."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        if self.config.hot_vocabulary:
            weights["hot_ids"] = self.hot_ids.to(torch.int32)
        save_file(weights, folder / "drafter.safetensors")
        config = {"drafter": "recurrent", **asdict(self.config), **(card or {})}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, target: Target) -> RecurrentDrafter:
        """Load our own format or Apple's ReDrafter checkpoint.

        Raises ValueError when the drafter does not fit the target, KeyError (a weight's name).
        """
        raw = json.loads((folder / "config.json").read_text())
        own = raw.get("drafter") == "recurrent"
        file = next(iter(sorted(folder.glob("drafter.safetensors" if own else "*.safetensors"))), None)
        if file is None:
            raise FileNotFoundError(f"{folder}: no {'drafter' if own else '*'}.safetensors")
        with safe_open(file, framework="pt") as tensors:
            weights = {name: tensors.get_tensor(name).float() for name in tensors.keys()}  # noqa: SIM118
        if own:
            config = RecurrentConfig(**{name: raw[name] for name in RecurrentConfig.__dataclass_fields__})
        elif "num_draft_layers" in raw:
            config, weights = from_apple(raw, weights)
        else:
            raise ValueError(f"{folder}/config.json describes no recurrent drafter (found keys {sorted(raw)})")
        hot_ids = weights.pop("hot_ids", None)
        drafter = cls(config, target, hot_ids)
        drafter.load_state_dict(weights)
        return drafter.eval()


def from_apple(raw: dict[str, Any], weights: dict[str, Tensor]) -> tuple[RecurrentConfig, dict[str, Tensor]]:
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
        raise KeyError("input_proj.weight")
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
        hidden, raw["vocab_size"], exit_dim, blocks, "zero", "own", None, rnn_bias="rnn_u.bias" in weights
    )
    return config, out


BeamStep = Callable[..., tuple[Tensor, ...]]
"""A level of a beam search: see plugins/beam_step."""


class RecurrentDrafting(nn.Module):
    """The whole drafting loop as one network: beam search unrolled over `beam_length` levels.

    Each level expands at most `beam_width` nodes (the likeliest candidates of the level before, by
    cumulative probability) into `candidates` children each. The last level's best candidates are the
    beams; the best candidates of all levels are a best-first tree.
    """

    def __init__(self, drafter: RecurrentDrafter, beam_width: int, beam_length: int, candidates: int):
        super().__init__()
        if candidates < beam_width:
            raise ValueError(f"candidates is {candidates}, expected at least the beam width {beam_width}")
        self.drafter = drafter
        self.beam_width, self.beam_length, self.candidates = beam_width, beam_length, candidates

    def forward(self, hidden: Tensor, tokens: Tensor, beam_step: BeamStep = beam_step) -> tuple[Tensor, Tensor, Tensor]:
        """hidden f32 [B, H] (whose logits gave the root), tokens i32 [B] (the root) to
        candidates i32 [B, L, W, K] (target ids), log_probs f32 [B, L, W, K] (cumulative; -inf where
        absent) and parents i32 [B, L, W] (flat candidate w * K + k of the level before)."""
        drafter, draft = self.drafter, list[Tensor]()
        state, context = drafter.first_state(tokens), drafter.context(hidden)
        for level in range(self.beam_length):
            values, ids = drafter.likeliest(state, context, self.candidates)
            *draft, tokens, origins = beam_step(values, ids, self.beam_width, *draft)
            if level == 0:
                context = F.embedding(origins, context)  # from a row for each sequence to one for each node
            if level + 1 < self.beam_length:
                state = drafter.next_state(F.embedding(origins, state), tokens)
        candidates, log_probs, parents, _ = draft
        return candidates, log_probs, parents
