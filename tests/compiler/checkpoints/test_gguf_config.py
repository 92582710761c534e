"""What the fields of a GGUF file say of a model."""

from __future__ import annotations

import pytest
import torch

from redraft.compiler.checkpoints.gguf_config import hf_config
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.registry import FAMILIES

FIELDS = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}


@pytest.mark.parametrize(("more", "betas"), [({}, (32, 1)), ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, (16, 2))])
def test_yarn_is_read_with_the_bounds_of_its_ramp(more, betas):
    own = FIELDS | {f"rope.scaling.{name}": value for name, value in more.items()}
    fields = {f"qwen2.{name}": value for name, value in own.items()}
    tensors = {"token_embd.weight": torch.empty(111, 64, device="meta")}
    config = TargetConfig.from_hf(hf_config(FAMILIES["qwen2"], fields, tensors))
    assert (config.rope.type, config.rope.factor, config.max_position) == ("yarn", 4.0, 512)
    assert (config.rope.beta_fast, config.rope.beta_slow) == betas


def config_of(**own):
    """The configuration of a llama file with these fields, and dots for double underscores in their names."""
    named = {name.replace("__", "."): value for name, value in own.items()}
    fields = {f"llama.{name}": value for name, value in (FIELDS | {"rope.scaling.type": None} | named).items()}
    tensors = {"token_embd.weight": torch.empty(111, 64, device="meta")}
    return TargetConfig.from_hf(hf_config(FAMILIES["llama"], fields, tensors))


def test_yarn_is_read_with_the_factor_that_converters_write():
    scaled = config_of(rope__scaling__type="yarn", rope__scaling__yarn_attn_factor=1.5)
    assert scaled.rope.attention_factor == 1.5


def test_a_factor_without_a_type_is_linear():
    """As to llama.cpp, of which older files name no type."""
    assert (config_of().rope.type, config_of().rope.factor) == ("linear", 4.0)
    assert config_of(rope__scaling__factor=1.0).rope.type == "default"
    oldest = config_of(rope__scaling__factor=None, rope__scale_linear=8.0)
    assert (oldest.rope.type, oldest.rope.factor) == ("linear", 8.0)


def test_rope_of_a_part_of_each_head_is_refused_where_the_family_has_none():
    assert config_of(rope__dimension_count=16).rope.share is None
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5, expected 1"):
        config_of(rope__dimension_count=8)


@pytest.mark.parametrize(
    ("texts", "named", "ends"),
    [
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, [1, 2]),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 2, "unknown": 0}, [2]),
        (["<|endoftext|>", "a", "<|end|>"], {"eos": 0, "unknown": 0}, [0, 2]),
        (["a", "</s>", "<turn>", "<message>"], {"eos": 1, "eot": 2, "eom": 3}, [1, 2, 3]),
        (["a", "</s>"], {}, None),
    ],
    ids=["Gemma 3", "SmolLM2", "Phi-4-mini", "named", "none"],
)
def test_ends_are_what_the_file_names_and_what_is_called_one(texts, named, ends):
    fields = {f"llama.{name}": value for name, value in FIELDS.items()} | {"tokenizer.ggml.tokens": texts}
    fields |= {f"tokenizer.ggml.{kind}_token_id": token for kind, token in named.items()}
    tensors = {"token_embd.weight": torch.empty(111, 64, device="meta")}
    assert hf_config(FAMILIES["llama"], fields, tensors)["eos_token_id"] == ends
