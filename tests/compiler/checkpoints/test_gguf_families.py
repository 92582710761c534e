"""GGUF files of every family that is read: the same model as Hugging Face's folder."""

from __future__ import annotations

import re
import string
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig

from redraft.compiler.checkpoints.gguf import GgufCheckpoint
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.gguf import EXPERT, EXPERT_PARTS
from tests.compiler.checkpoints.tiny_llama import fetch
from tests.model_defs.target.references import FAMILIES, LONG_ROPE, VOCAB, WINDOW, write_reference

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "phi4": "phi3",
    "smollm3": "smollm3",
    "gemma3": "gemma3",
    "qwen3 moe": "qwen3moe",
    "mixtral": "llama",
    "granite": "granite",
}
"""Architectures of files by family of `FAMILIES`."""
TURNED = ("llama", "smollm3", "granite")


class Vocabulary(NamedTuple):
    """The tokenizer of a family's published files."""

    model: str
    pre: str
    ends: tuple[str, ...]
    """What ends its answers, the file's own end token first"""

    @property
    def tokens(self) -> list[str]:
        """Some special tokens, all characters, and what is merged from them."""
        space = "\u2581" if self.model == "llama" else "\u0120"
        tokens = ["<unk>", "<s>", *reversed(self.ends), space, *string.printable[:94], "he", "ll"]
        return tokens + [f"[unused{i}]" for i in range(len(tokens), VOCAB)]


QWEN = Vocabulary("gpt2", "qwen2", ("<|im_end|>", "<|endoftext|>"))
VOCABULARIES = {
    "qwen2": QWEN,
    "qwen3": QWEN,
    "qwen3 moe": QWEN,
    "phi3": Vocabulary("llama", "default", ("<|endoftext|>", "<|end|>")),
    "phi4": Vocabulary("gpt2", "gpt-4o", ("<|endoftext|>", "<|end|>")),
    "smollm3": Vocabulary("gpt2", "smaug-bpe", ("<|im_end|>", "<|end_of_text|>")),
    "gemma3": Vocabulary("llama", "default", ("<eos>", "<end_of_turn>")),
    "mixtral": Vocabulary("llama", "default", ("</s>",)),
    "granite": Vocabulary("gpt2", "refact", ("<|end_of_text|>",)),
}


def fields(family: str, config) -> dict[str, int | float]:
    """What the file says of the model, by fields' names without the architecture."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    own: dict[str, dict[str, int | float]] = {
        "phi3": {"attention.sliding_window": WINDOW, "rope.dimension_count": size},
        "phi4": {"rope.scaling.original_context_length": 64, "rope.dimension_count": int(size * 0.75)},
        "smollm3": {"rope.freq_base": 2e6},
        "gemma3": {"attention.sliding_window": WINDOW, "rope.freq_base": 1e6},
        "qwen3 moe": {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": getattr(config, "moe_intermediate_size", 0),
        },
        "granite": {
            "embedding_scale": getattr(config, "embedding_multiplier", 1.0),
            "attention.scale": getattr(config, "attention_multiplier", 1.0),
            "residual_scale": getattr(config, "residual_multiplier", 1.0),
            "logit_scale": getattr(config, "logits_scaling", 1.0),
        },
        "mixtral": {"expert_count": 3, "expert_used_count": 2, "rope.freq_base": 1e6},
    }
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
        **own.get(family, {}),
    }


def write(path, family: str, config, weights: dict[str, torch.Tensor], quantization=None) -> None:
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields(family, config).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{name}", value)
    write_tokenizer(writer, VOCABULARIES[family])
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    for name, weight in weights.items():
        if expert := EXPERT.fullmatch(name):
            part = EXPERT_PARTS[expert[3]]
            layer = expert[1].replace("model.layers", "blk")
            stacked.setdefault(f"{layer}.ffn_{part}_exps.weight", {})[int(expert[2])] = weight
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and architecture in TURNED:
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        add(writer, stored, weight, quantization)
    for stored, experts in stacked.items():
        add(writer, stored, torch.stack([experts[e] for e in range(len(experts))]), quantization)
    if family == "phi4":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(LONG_ROPE[f"{name}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer, vocabulary: Vocabulary) -> None:
    tokens, special = vocabulary.tokens, {"<s>", *vocabulary.ends}
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    if vocabulary.model == "llama":
        writer.add_token_scores([-float(place) for place in range(len(tokens))])
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_unk_token_id(tokens.index("<unk>"))
    else:
        writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(tokens.index(vocabulary.ends[0]))


def add(writer, name: str, weight: torch.Tensor, quantization) -> None:
    values = weight.float().numpy()
    if quantization is None or values.ndim < 2:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)


@pytest.mark.parametrize("family", ARCHITECTURES)
@torch.no_grad()
def test_files_of_every_family(family, tmp_path, monkeypatch):
    """Gemma's files do not say which layers have a window: one of six has none. Mixtral's say nothing of one."""
    changes = {
        "gemma3": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3},
        "mixtral": {"sliding_window": None},
    }
    config = FAMILIES[family].to_dict() | changes.get(family, {})
    monkeypatch.setitem(FAMILIES, family, type(FAMILIES[family])(**config))
    reference = write_reference(family, tmp_path / "hf")
    weights = {name: x.bfloat16().float() for name, x in load_file(tmp_path / "hf" / "model.safetensors").items()}
    write(tmp_path / "tiny.gguf", family, reference.config, weights)
    folder, vocabulary = fetch(tmp_path / "tiny.gguf", tmp_path), VOCABULARIES[family]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in vocabulary.tokens] == list(range(VOCAB))
    assert tokenizer.encode("hello" + vocabulary.ends[0]).tokens[-4:] == ["he", "ll", "o", vocabulary.ends[0]]
    target = Target.from_folder(folder)
    assert target.config.eos_token_ids == tuple(vocabulary.tokens.index(end) for end in vocabulary.ends)
    for weight in reference.parameters():
        weight.copy_(weight.bfloat16())
    ids = torch.randint(0, VOCAB, (2, 90))
    want = reference(ids).logits
    found = target.lm_head(target(ids, causal_attend(target.config, 90)).hidden)
    torch.testing.assert_close(found, want, atol=1e-4 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0", "BF16"])
def test_quantized_experts_are_what_the_package_says(quantization, tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    monkeypatch.setitem(FAMILIES, "qwen3 moe", Qwen3MoeConfig(**FAMILIES["qwen3 moe"].to_dict() | sizes))
    reference = write_reference("qwen3 moe", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    kind = gguf.GGMLQuantizationType[quantization]
    write(tmp_path / "tiny.gguf", "qwen3 moe", reference.config, weights, kind)
    checkpoint = GgufCheckpoint(tmp_path / "tiny.gguf", "tiny")
    for name, weight in weights.items():
        if weight.ndim == 2:
            found = torch.cat(list(checkpoint.chunks(name)))
            expected = gguf.dequantize(gguf.quantize(weight.float().numpy(), kind), kind)
            np.testing.assert_array_equal(found.numpy(), expected.reshape(weight.shape), err_msg=name)


def test_an_unknown_architecture_is_told_which_are_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    known = "gemma3, granite, llama, phi3, qwen2, qwen3, qwen3moe, smollm3"
    with pytest.raises(FetchError, match=re.escape(f"architecture 'mamba', expected {known}. Supported: Llama")):
        GgufCheckpoint(tmp_path / "other.gguf", "other")
