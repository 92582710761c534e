"""The target: the Llama family as one torch module.

The module computes everything but attention's access to context; that is a callable, so that the
same definition trains drafters (dense attention), generates (a preallocated cache) and is exported
(plugin and native forms).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_defs.config import TargetConfig
from model_defs.files import read_tensors

Join = Callable[[Tensor, Tensor], Tensor]
"""join(stream, part) -> stream: the residual stream and what a block gives, both [..., hidden_size]. Their sum; of a
shard, whose blocks give parts, the sum over all ranks."""

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, qkv) -> out: `qkv` [..., (heads + 2 kv_heads) * head_size], the fused projections of
the rows before RoPE; `out` [..., heads * head_size]. It applies RoPE, keeps the cache, and attends."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads * config.head_size
        kv = config.num_kv_heads * config.head_size
        self.attention_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, heads + 2 * kv, bias=config.qkv_bias)
        self.attention_out = nn.Linear(heads, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self, x: Tensor, layer: int, attend: Attend, rows: Tensor | None = None, join: Join = torch.add
    ) -> Tensor:
        """`rows` int32 [n]: the rows of x [N, H] that go on behind attention; the others are context alone."""
        attended = attend(layer, self.qkv(self.attention_norm(x)))
        if rows is not None:
            x, attended = F.embedding(rows, x), F.embedding(rows, attended)
        x = join(x, self.attention_out(attended))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return join(x, self.down(F.silu(gate) * up))


class Target(nn.Module):
    """Token ids to hidden states (after the final norm) and hidden states to logits."""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attend: Attend, join: Join = torch.add) -> Tensor:
        """int [...] token ids to [..., hidden_size], what the LM head and the drafters take."""
        x = self.embedding(input_ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend, join=join)
        return self.norm(x)

    @classmethod
    def check_weights(cls, hf: dict[str, Tensor], config: TargetConfig) -> tuple[Target, dict[str, Tensor]]:
        """A target without storage (device "meta") and the weights it needs, under its own names.

        `hf` holds Hugging Face names; meta tensors do for a check of names and shapes.
        Raises ValueError naming a missing weight, or one of another shape.
        """
        with torch.device("meta"):
            target = cls(config)
        try:
            weights = fuse_hf_weights(hf, config)
        except KeyError as missing:
            raise ValueError(f"weight {missing} is missing") from None
        for name, expected in target.state_dict().items():
            if weights[name].shape != expected.shape:
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(expected.shape)}")
        return target, weights

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Target:
        """Load a Hugging Face folder's safetensors. Raises UnsupportedModelError, FileNotFoundError or
        ValueError (a missing weight, or one of another shape)."""
        config = TargetConfig.load(folder)
        target, weights = cls.check_weights(_read_safetensors(folder), config)
        target.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        if config.tie_embeddings:
            target.lm_head.weight = target.embedding.weight
        return target.eval().requires_grad_(False)


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= read_tensors(file)
    return weights


def fuse_hf_weights(hf: dict[str, Tensor], config: TargetConfig) -> dict[str, Tensor]:
    """Hugging Face names to ours, with Q, K, V and gate, up concatenated along their rows."""
    out = {"embedding.weight": hf["model.embed_tokens.weight"], "norm.weight": hf["model.norm.weight"]}
    out["lm_head.weight"] = hf["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            out[f"{layer}.qkv.{kind}"] = torch.cat([hf[f"{source}.self_attn.{p}_proj.{kind}"] for p in "qkv"])
        out[f"{layer}.attention_out.weight"] = hf[f"{source}.self_attn.o_proj.weight"]
        out[f"{layer}.gate_up.weight"] = torch.cat([hf[f"{source}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
        out[f"{layer}.down.weight"] = hf[f"{source}.mlp.down_proj.weight"]
        out[f"{layer}.attention_norm.weight"] = hf[f"{source}.input_layernorm.weight"]
        out[f"{layer}.mlp_norm.weight"] = hf[f"{source}.post_attention_layernorm.weight"]
    return out
