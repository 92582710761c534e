"""The target in TensorRT-LLM's checkpoint format: names, configuration, and what each rank holds.

The rules are those of TensorRT-LLM's Llama and Qwen2 (docs/guides/tensorrt-llm.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target

EMBEDDING, LM_HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"
ROWS = ("lm_head.weight", "mlp.fc.weight", "mlp.gate.weight")
COLUMNS = ("attention.dense.weight", "mlp.proj.weight")
HF_NAMES = {
    "attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.fc.weight": "mlp.gate_proj.weight",
    "mlp.gate.weight": "mlp.up_proj.weight",
    "mlp.proj.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_layernorm.weight": "post_attention_layernorm.weight",
}
"""A layer's weights in TensorRT-LLM's format and in Hugging Face's, all but attention.qkv."""

OWN_NAMES = {
    "attention.dense.weight": "attention_out.weight",
    "mlp.proj.weight": "down.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_layernorm.weight": "mlp_norm.weight",
}
"""The same in `Target`, but for its fused gate_up."""

LLAMA, QWEN = ("ReDrafterForLLaMALM", "LlamaForCausalLM"), ("ReDrafterForQWenLM", "Qwen2ForCausalLM")
OLD_LLAMA = "ReDrafterForCausalLM"
"""What TensorRT-LLM called ReDrafter beside a Llama before it knew another target."""

ARCHITECTURES = (LLAMA[0], QWEN[0], OLD_LLAMA)
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_size"),
)


class TrtllmError(ValueError):
    """What was asked for has no place in TensorRT-LLM's format, or a checkpoint is not one that can be read."""


def target_entries(config: TargetConfig) -> dict[str, Any]:
    """What config.json says of a target. Raises TrtllmError for a family that the format's rules here do not know."""
    require_known_layers(config)
    architecture, base = QWEN if config.qkv_bias else LLAMA
    entries = {
        "architecture": architecture,
        "base_model_architecture": base,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "hidden_act": "silu",
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position,
        "rotary_base": config.rope.theta,
        "rotary_scaling": config.rope.scaling("type"),
        "attn_bias": config.qkv_bias,
        "mlp_bias": False,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    return entries | ({"qwen_type": "qwen2"} if config.qkv_bias else {})


def require_known_layers(config: TargetConfig) -> None:
    """Raise TrtllmError for layers that are not Llama's or Qwen2's."""
    optional = [field for field in fields(config) if field.name != "family" and field.default is not MISSING]
    if names := [field.name for field in optional if getattr(config, field.name) != field.default]:
        raise TrtllmError(f"the family {config.family!r} has {', '.join(names)}: expected Llama's or Qwen2's layers")
    try:
        config.rope.scaling()
    except ValueError as error:
        raise TrtllmError(str(error)) from None


@dataclass(frozen=True)
class Parallelism:
    """How weights are divided over `tp_size` ranks; `embedding_dim` None: every rank has the whole embedding."""

    tp_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    embedding_dim: int | None = None

    @property
    def copies(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of Q, K and V in one rank's fused weight."""
        kv = self.num_kv_heads * self.copies // self.tp_size
        return [self.num_heads // self.tp_size * self.head_size, kv * self.head_size, kv * self.head_size]

    def split(self, name: str, weight: Tensor) -> list[Tensor]:
        """Each rank's part of a whole weight."""
        if ".attention.qkv." in name:
            kv_rows = self.num_kv_heads * self.head_size
            q, k, v = weight.split([self.num_heads * self.head_size, kv_rows, kv_rows])
            parts = (q.chunk(self.tp_size), self._split_kv(k), self._split_kv(v))
            return [torch.cat(rank) for rank in zip(*parts, strict=True)]
        dim = self._dim(name)
        return [weight] * self.tp_size if dim is None else list(weight.chunk(self.tp_size, dim))

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole weight of which `parts` are the ranks'. Raises TrtllmError where copies of one thing differ."""
        if ".attention.qkv." in name:
            q, k, v = zip(*(part.split(self.qkv_rows) for part in parts), strict=True)
            return torch.cat([*q, *self._unique(name, k, self.copies), *self._unique(name, v, self.copies)])
        dim = self._dim(name)
        if dim is None:
            return self._unique(name, parts, self.tp_size)[0]
        return torch.cat(list(parts), dim)

    def _split_kv(self, weight: Tensor) -> list[Tensor]:
        return [part for part in weight.chunk(self.tp_size // self.copies) for _ in range(self.copies)]

    def _dim(self, name: str) -> int | None:
        if name == EMBEDDING:
            return self.embedding_dim
        if name.startswith("drafter.") or name.endswith(ROWS):
            return 0
        return 1 if name.endswith(COLUMNS) else None

    @staticmethod
    def _unique(name: str, parts: Sequence[Tensor], copies: int) -> list[Tensor]:
        """The first of each `copies` parts in a row, which must be equal."""
        for rank, part in enumerate(parts):
            if not torch.equal(part, parts[rank - rank % copies]):
                raise TrtllmError(f"{name}: ranks {rank - rank % copies} and {rank} differ, expected the same weights")
        return list(parts[::copies])


def parallelism_of(config: TargetConfig, tp_size: int, embedding_dim: int | None = None) -> Parallelism:
    """Raises TrtllmError where TensorRT-LLM cannot divide the target so, or its layers are of another family."""
    require_known_layers(config)
    if reasons := misfits(config, tp_size):
        fitting = [str(size) for size in range(1, config.num_heads + 1) if not misfits(config, size)]
        raise TrtllmError(
            f"--tp {tp_size}: TensorRT-LLM needs {'; '.join(reasons)}. This target can have TP {', '.join(fitting)}."
        )
    return Parallelism(tp_size, config.num_heads, config.num_kv_heads, config.head_size, embedding_dim)


def misfits(config: TargetConfig, tp_size: int) -> list[str]:
    """Why TensorRT-LLM cannot divide a target over so many ranks.

    Its drafting loop takes the vocabulary without the rows that would pad it, so that must divide too.
    """
    kv, sizes = config.num_kv_heads, {
        "attention heads": config.num_heads,
        "rows of the vocabulary": config.vocab_size,
        "rows of the MLP": config.intermediate_size,
        "rows of the hidden state": config.hidden_size,
    }  # fmt: skip
    reasons = [f"the {size} {what} to be a multiple of it" for what, size in sizes.items() if size % tp_size]
    if kv % tp_size and tp_size % kv:
        reasons.append(f"the {kv} KV heads to be a multiple of it, or it a multiple of them")
    return reasons


def target_weights(target: Target) -> dict[str, Tensor]:
    """A target's weights, whole, under TensorRT-LLM's names."""
    state = target.state_dict()
    out = {
        EMBEDDING: state["embedding.weight"],
        "transformer.ln_f.weight": state["norm.weight"],
        LM_HEAD: state["lm_head.weight"],
    }
    for index in range(target.config.num_layers):
        source, layer = f"layers.{index}", f"transformer.layers.{index}"
        for kind in ("weight", "bias") if target.config.qkv_bias else ("weight",):
            out[f"{layer}.attention.qkv.{kind}"] = state[f"{source}.qkv.{kind}"]
        out[f"{layer}.mlp.fc.weight"], out[f"{layer}.mlp.gate.weight"] = state[f"{source}.gate_up.weight"].chunk(2)
        out |= {f"{layer}.{name}": state[f"{source}.{ours}"] for name, ours in OWN_NAMES.items()}
    return out


def hf_weights(weights: dict[str, Tensor], config: TargetConfig) -> dict[str, Tensor]:
    """A target's weights under Hugging Face's names, from those of a checkpoint, whole.

    Raises KeyError (a missing weight's name) or TrtllmError.
    """
    out = {"model.embed_tokens.weight": weights[EMBEDDING], "model.norm.weight": weights["transformer.ln_f.weight"]}
    if not config.tie_embeddings:
        out["lm_head.weight"] = weights[LM_HEAD]
    elif not torch.equal(weights.get(LM_HEAD, weights[EMBEDDING]), weights[EMBEDDING]):
        raise TrtllmError(f"{LM_HEAD} is not {EMBEDDING}, which the target's config.json calls tied")
    kv = config.num_kv_heads * config.head_size
    for index in range(config.num_layers):
        source, layer = f"transformer.layers.{index}", f"model.layers.{index}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = weights[f"{source}.attention.qkv.{kind}"].split([config.num_heads * config.head_size, kv, kv])
            out |= {f"{layer}.self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", parts, strict=True)}
        out |= {f"{layer}.{theirs}": weights[f"{source}.{name}"] for name, theirs in HF_NAMES.items()}
    return out
