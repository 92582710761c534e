"""Tiny random transformers models of every family, the reference of the target module."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB = 111
WINDOW = 13
"""Of every family that has a sliding window."""
ORIGINAL = 64
"""Positions beyond which LongRoPE and dynamic RoPE differ."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 8.0,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.5],
    "long_factor": [1.2, 2.5, 7.0],
    "original_max_position_embeddings": ORIGINAL,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
OPT_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 200,
    "init_std": 0.2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama 2": LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama 3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "vicuna 16k": LlamaConfig(**SHAPE | {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}, rope_parameters=LINEAR_ROPE),
    "yarn": LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "dynamic": LlamaConfig(**SHAPE | {"max_position_embeddings": ORIGINAL}, rope_parameters=DYNAMIC_ROPE),
    "smollm2": LlamaConfig(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "mistral, window": MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "phi3": Phi3Config(**SHAPE, sliding_window=WINDOW),
    "phi4": Phi3Config(**SHAPE, rope_parameters=LONG_ROPE, original_max_position_embeddings=ORIGINAL),
    "smollm3": SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=24
    ),
    "opt": OPTConfig(**OPT_SHAPE),
    "qwen3 moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "glm4": Glm4Config(**SHAPE, head_dim=16, eos_token_id=2),
    "glm4, no biases, whole heads": Glm4Config(
        **SHAPE, head_dim=16, eos_token_id=2, attention_bias=False, partial_rotary_factor=1.0
    ),
    "granite": GraniteConfig(**SHAPE, tie_word_embeddings=True, **MULTIPLIERS),
    "granite, untied": GraniteConfig(**SHAPE, rope_parameters=LINEAR_ROPE, **MULTIPLIERS),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2, sliding_window=WINDOW),
}


def write_reference(name: str, folder: Path) -> PreTrainedModel:
    """The family's random model, norms and biases included, saved to a folder."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    with torch.no_grad():
        for weight_name, weight in reference.named_parameters():
            if "norm" in weight_name or weight_name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.3)
    reference.save_pretrained(folder)
    return reference
