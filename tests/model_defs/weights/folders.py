"""Model folders with a tiny Qwen2, or a relative, whose weights a GGUF file has in blocks of every type."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.families.registry import FAMILIES
from redraft.model_defs.target.model import Target, weights_of
from redraft.model_defs.weights.folder import GGUF, METHOD
from redraft.model_defs.weights.gguf import EXPERT, EXPERT_PARTS

RAW = {
    "model_type": "qwen2",
    "vocab_size": 111,
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "quantization_config": {"quant_method": METHOD},
}
MIXED = {
    **{"token_embd": "Q6_K", "output": "Q4_1", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K"},
    **{"attn_output": "Q5_K", "ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "Q5_0"},
}
"""Types by the names of tensors: each of a layer's products has several, or one that no other has"""
EXPERTS = {
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
EXPERT_TYPES = MIXED | {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q5_0"}
"""A mixture of experts: what `write_folder` takes for it"""
HALVES = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
"""Where blocks that the package only reads have their float16 numbers"""


def write_folder(folder: Path, types: dict[str, str] | None = None, **raw: object) -> Path:
    """A folder of random weights, in MIXED or in other types; F32 for what has no type."""
    rng, types = np.random.default_rng(0), MIXED if types is None else types
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(RAW | raw))
    config = TargetConfig.load(folder)
    target, stacks = Target(config), defaultdict(list)
    architecture = FAMILIES[config.family].gguf.architecture
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    writer = gguf.GGUFWriter(folder / GGUF, config.family)
    for ours, weight in weights_of(config).items():
        whole = np.empty(target.get_parameter(ours).shape, np.float32)
        rows = np.array_split(whole.reshape(-1, whole.shape[-1]) if whole.ndim == 3 else whole, len(weight.sources))
        if ".qkv." in ours:
            queries, head = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
            rows = [whole[:queries], whole[:head], whole[:head]]
        for source, like in zip(weight.sources, rows, strict=True):
            expert = EXPERT.fullmatch(source)
            if expert:
                source = f"{expert[1]}.mlp.experts.{EXPERT_PARTS[expert[3]]}_proj.weight"
            name = names.get_name(source, try_suffixes=(".weight", ".bias"))
            kind = types.get(re.sub(r"blk\.\d+\.", "", name).removesuffix(".weight"))
            offset = 1.0 if like.ndim == 1 and "norm" in name else 0.0
            values = (rng.standard_normal(like.shape) / 16 + offset).astype(np.float32)
            kind = gguf.GGMLQuantizationType[kind or "F32"]
            stored = values if kind.name == "F32" else blocks_of(values, kind, rng)
            if expert:
                stacks[name, kind].append(stored)
            else:
                writer.add_tensor(name, stored, raw_dtype=kind)
    for (name, kind), experts in stacks.items():
        writer.add_tensor(name, np.stack(experts), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def blocks_of(weight: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """A matrix in a type, uint8 [rows, bytes]; random blocks where the package only reads the type."""
    if kind.name not in HALVES:
        return gguf.quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // block, size), dtype=np.uint8)
    for at in HALVES[kind.name]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return blocks.reshape(len(weight), -1)
