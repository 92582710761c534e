"""Which checkpoints a target configuration accepts, and what it says of the others."""

from __future__ import annotations

import json

import pytest

from model_defs.target.config import TargetConfig
from model_defs.target.errors import UnsupportedModelError
from model_defs.target.families.registry import SUPPORTED

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
WINDOW = "an active sliding window of 64 tokens, expected full attention to all 128"


def test_old_and_new_rope_fields_say_the_same():
    scaling = {"type": "linear", "factor": 4.0}
    old = TargetConfig.from_hf({**LLAMA, "rope_theta": 500.0, "rope_scaling": scaling})
    new = TargetConfig.from_hf(
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    )
    assert old == new
    assert new.num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model_type": "mixtral"}, f"model_type 'mixtral'. Supported: {SUPPORTED}."),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias true, expected false"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias true, expected false"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "RoPE type 'yarn', expected default, linear, llama3",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, expected 1.0"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "pre-quantized weights (gptq), expected float weights or a GGUF",
        ),
        ({"sliding_window": 64}, WINDOW),
        ({"model_type": "mistral", "sliding_window": 64}, WINDOW),
        ({"head_dim": 17}, "heads of size 17, whose elements RoPE cannot turn in pairs"),
        ({"num_key_value_heads": 3}, "4 heads, which 3 KV heads cannot share evenly"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, WINDOW),
    ],
)
def test_refuses_what_it_cannot_compute(change, found):
    with pytest.raises(UnsupportedModelError) as refusal:
        TargetConfig.from_hf({**LLAMA, **change})
    assert str(refusal.value) == f"unsupported model: {found}"


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 128},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    ],
)
def test_an_inactive_sliding_window_is_full_attention(change):
    assert TargetConfig.from_hf({**LLAMA, **change}).num_layers == 2


@pytest.mark.parametrize(("family", "qkv_bias"), [("llama", False), ("mistral", False), ("qwen2", True)])
def test_a_family_has_the_biases_of_its_checkpoints(family, qkv_bias):
    assert TargetConfig.from_hf({**LLAMA, "model_type": family}).qkv_bias is qkv_bias


def test_lists_the_known_families_for_an_unknown_one():
    with pytest.raises(UnsupportedModelError, match=r"model_type None\. .*llama.*mistral.*qwen2"):
        TargetConfig.from_hf({key: value for key, value in LLAMA.items() if key != "model_type"})


def test_names_a_missing_field_and_prefers_generation_end_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert TargetConfig.load(tmp_path).eos_token_ids == (5, 6)
    incomplete = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(incomplete))
    with pytest.raises(ValueError, match=r"config\.json: field 'hidden_size' is missing"):
        TargetConfig.load(tmp_path)
