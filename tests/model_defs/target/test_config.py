"""Which checkpoints a target configuration accepts, and what it says of the others."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.granite import MULTIPLIERS
from redraft.model_defs.target.families.opt import EXPECTED
from redraft.model_defs.target.families.registry import SUPPORTED
from redraft.model_defs.target.fingerprint import described

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
        ({"model_type": "gemma3"}, f"model_type 'gemma3'. Supported: {SUPPORTED}."),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias true, expected false"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias true, expected false"),
        (
            {"rope_scaling": {"rope_type": "mrope"}},
            "RoPE type 'mrope', expected default, linear, llama3, dynamic, yarn, longrope",
        ),
        ({"sliding_window": 64}, WINDOW),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, expected 1"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling beside other rope_parameters, expected one of them",
        ),
        ({"head_dim": 17}, "heads of size 17, whose elements RoPE cannot turn in pairs"),
        ({"num_key_value_heads": 3}, "4 heads, which 3 KV heads cannot share evenly"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window true, expected false",
        ),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, expected none"),
        (
            {"model_type": "gemma3_text", "hidden_activation": "gelu"},
            "hidden_activation 'gelu', expected 'gelu_pytorch_tanh'",
        ),
        (
            {"model_type": "opt", "ffn_dim": 96, "do_layer_norm_before": False},
            "do_layer_norm_before False, expected True",
        ),
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim 32, expected 64"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2, expected 1"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "mlp_only_layers [0], expected experts in every layer",
        ),
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
        {"model_type": "mistral", "sliding_window": 0},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    ],
)
def test_an_inactive_sliding_window_is_full_attention(change):
    config = TargetConfig.from_hf({**LLAMA, **change})
    assert [config.window_of(layer) for layer in range(2)] == [None, None]


def test_yarn_reaches_beyond_what_the_file_says():
    """As Qwen tells its users to write it: the factor beside the original context, which stays the file's."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    window = {"model_type": "mistral", "sliding_window": 256}
    config = TargetConfig.from_hf({**LLAMA, **window, "rope_scaling": scaling})
    assert (config.max_position, config.window_of(0)) == (512, 256)
    told = TargetConfig.from_hf({**LLAMA, **window, "rope_scaling": scaling, "max_position_embeddings": 512})
    assert told == config
    layers = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config = TargetConfig.from_hf({**LLAMA, **layers, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.others is not None
    assert (config.others.rope, config.max_position) == (config.rope, 512)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, [64, 64]),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, [None, 64]),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [64, None],
        ),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [64, None]),
    ],
)
def test_layers_have_the_windows_of_their_family(change, windows):
    config = TargetConfig.from_hf({**LLAMA, **change})
    assert [config.window_of(layer) for layer in range(2)] == windows


def test_gemmas_configurations_of_either_form_have_two_rope_tables():
    old = {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
    }
    configs = [
        TargetConfig.from_hf({**LLAMA, "model_type": "gemma3_text", "sliding_window": 64, **change})
        for change in (old, {"rope_parameters": new})
    ]
    assert configs[0] == configs[1]
    assert configs[0].others is not None
    assert (configs[0].rope.factor, configs[0].others.rope.theta, configs[0].others.rope.factor) == (8.0, 500.0, 1.0)


def test_a_feature_that_a_target_lacks_does_not_change_its_fingerprint():
    """What drafters that were trained before a feature was known have written down."""
    config = TargetConfig.from_hf({**LLAMA, "model_type": "qwen2"})
    known = {"vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size"}
    known |= {"rms_norm_eps", "rope", "max_position", "tie_embeddings", "qkv_bias", "eos_token_ids"}
    assert set(described(config)) == known
    rope = {"theta", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position"}
    assert set(described(config)["rope"]) == rope


def test_names_a_missing_field_and_prefers_generation_end_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    for generation, ends in (({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": None}, (2,)), ({}, (2,))):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert TargetConfig.load(tmp_path).eos_token_ids == ends
    incomplete = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(incomplete))
    with pytest.raises(ValueError, match=r"config\.json: field 'hidden_size' is missing"):
        TargetConfig.load(tmp_path)


NOTHING_COMPUTED = {
    *("output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type"),
    *("initializer_range", "init_std", "use_cache", "pad_token_id", "bos_token_id", "pretraining_tp", "architectures"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "dropout", "layerdrop", "output_attentions", "id2label"),
    *("label2id", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "transformers_version"),
    *("_name_or_path", "_sliding_window_pattern"),
}
"""Fields of transformers' configurations that change no logits, and one that `layer_types` spells out"""
READ = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "eos_token_id"),
    *("tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval", "num_experts_per_tok"),
    *("moe_intermediate_size", "num_local_experts", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "hidden_activation", "final_logit_softcapping"),
    *("attn_logit_softcapping", "use_bidirectional_attention", "ffn_dim", "word_embed_proj_dim"),
    *("activation_function", *EXPECTED, *MULTIPLIERS),
}
"""Fields that some family reads or refuses"""


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3", "gemma3_text", "granite"]
)
def test_what_a_file_leaves_out_is_what_transformers_takes(family):
    """And a field that transformers computes with is read or refused."""
    usual = CONFIG_MAPPING[family]().to_dict()
    assert usual.keys() <= READ | NOTHING_COMPUTED
    layers = usual["num_hidden_layers"]
    for name in (
        "sliding_window",
        "tie_word_embeddings",
        "head_dim",
        "rope_parameters",
        "layer_types",
        "norm_topk_prob",
    ):
        left_out = {key: value for key, value in usual.items() if key != name}
        found, whole = TargetConfig.from_hf(left_out), TargetConfig.from_hf(usual)
        assert found == whole, name
        assert [found.window_of(layer) for layer in range(layers)] == [
            whole.window_of(layer) for layer in range(layers)
        ]


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.2),
        ("final_logit_softcapping", 30.0),
        ("clip_qkv", 8.0),
        ("qk_layernorm", True),
        ("use_parallel_residual", True),
        ("n_routed_experts", 64),
        ("sliding_window_pattern", 6),
        ("no_rope_layer_interval", 4),
        ("attention_chunk_size", 8192),
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("rope_interleaved", True),
    ],
)
def test_a_field_of_another_familys_computation_is_refused_by_name(family, field, value):
    raw = {**LLAMA, "model_type": family, "num_local_experts": 2 if family == "mixtral" else None}
    raw |= {"num_experts_per_tok": 1}
    with pytest.raises(UnsupportedModelError, match=field):
        TargetConfig.from_hf({**raw, field: value})
    TargetConfig.from_hf({**raw, field: None})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text"])
def test_heads_that_always_have_norms_may_be_said_to(family):
    """As Qwen3-Coder's files do, which transformers does not read."""
    raw = CONFIG_MAPPING[family]().to_dict()
    coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "max_window_layers": 28}
    assert TargetConfig.from_hf(raw | coder).qk_norm


def test_a_dense_model_may_say_that_it_has_no_experts():
    assert TargetConfig.from_hf({**LLAMA, "num_experts": 0, "num_local_experts": 0, "no_rope_layer_interval": 0})
    with pytest.raises(ValueError, match="num_experts is 0, expected a whole number from 1"):
        TargetConfig.from_hf({**LLAMA, "model_type": "qwen3_moe", "num_experts": 0})


@pytest.mark.parametrize("field", ["long_mscale", "llama_4_scaling_beta", "alpha"])
def test_an_unknown_rope_parameter_is_refused_by_name(field):
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(UnsupportedModelError, match=f"RoPE parameter '{field}', which is not read"):
            TargetConfig.from_hf({**LLAMA, name: {"rope_type": "linear", "factor": 2.0, field: 1.2}})
        assert TargetConfig.from_hf({**LLAMA, name: {"rope_type": "linear", "factor": 2.0, field: None}})
