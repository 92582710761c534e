"""EAGLE-3 drafters in others' forms: what their loaders require is there, and reading it back restores every weight."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from redraft.cli import export
from redraft.model_defs.drafters.eagle3 import Eagle3Config, Eagle3Drafter, ParallelEagle3Config, ParallelEagle3Drafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from tests.cli.commands import invoke
from tests.engines.tiny import VOCAB, random_model, tiny_drafter, tiny_target, write_model
from tests.model_defs.drafters.hub.forms import speculators

run = partial(invoke, export.eagle3)
SIZE, ROWS, MLP = 24, 53, 40
LAYER = {
    "input_layernorm.weight": (SIZE,),
    "hidden_norm.weight": (SIZE,),
    "post_attention_layernorm.weight": (SIZE,),
    "self_attn.q_proj.weight": (96, 2 * SIZE),
    "self_attn.k_proj.weight": (32, 2 * SIZE),
    "self_attn.v_proj.weight": (32, 2 * SIZE),
    "self_attn.o_proj.weight": (SIZE, 96),
    "mlp.gate_proj.weight": (MLP, SIZE),
    "mlp.up_proj.weight": (MLP, SIZE),
    "mlp.down_proj.weight": (SIZE, MLP),
}
BIASES = {
    "self_attn.q_proj.bias": (96,),
    "self_attn.k_proj.bias": (32,),
    "self_attn.v_proj.bias": (32,),
    "self_attn.o_proj.bias": (SIZE,),
}
"""Of a layer with `attention_bias`, which all three loaders take to mean the last one too."""
SHARED = {
    "embed_tokens.weight": (VOCAB, SIZE),
    "fc.weight": (SIZE, 3 * SIZE),
    "norm.weight": (SIZE,),
    "lm_head.weight": (ROWS, SIZE),
    "d2t": (ROWS,),
    "t2d": (VOCAB,),
}
FIRST = {"speculators": "layers.0", "specforge": "midlayer"}
"""What each form calls the first layer. Its keys and shapes are SHARED, and those of LAYER after this name."""


FIELDS = {
    "speculators": {
        *("speculators_model_type", "transformer_layer_config", "draft_vocab_size", "norm_before_residual"),
        *("norm_before_fc", "eagle_aux_hidden_state_layer_ids", "speculators_config"),
    },
    "specforge": {
        *("architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "draft_vocab_size"),
        *("tie_word_embeddings", "torch_dtype", "rms_norm_eps"),
    },
}
"""What loaders read of `config.json`: vLLM's of speculators' form (vllm/model_executor/models/llama_eagle3.py of
00bd1493), SGLang's (python/sglang/srt/models/llama_eagle3.py of 03d5a777) and TensorRT-LLM's of SpecForge's
(tensorrt_llm/_torch/models/modeling_speculative.py in 1.2.0rc2). They take the tensors below and refuse others."""
TRTLLM_YAML = """\
speculative_config:
  decoding_type: Eagle
  max_draft_len: 5
  speculative_model_dir: out
  eagle3_layers_to_capture: [1, 2, 4]
"""
"""By the names of tensorrt_llm/llmapi/llm_args.py in 1.2.0rc2. TensorRT-LLM of 2026 says Eagle3 (its PR 10124) and
speculative_model (PR 10099), and takes the old names too."""


@pytest.fixture(scope="module")
def target() -> Target:
    return random_model(replace(tiny_target().config, num_layers=7, hidden_size=SIZE, intermediate_size=MLP))


@pytest.fixture
def model(target, tmp_path) -> Path:
    write_model(target, tmp_path / "model")
    return tmp_path / "model"


def drafter_of(
    target: Target, qk_norm: bool = False, window: int | None = None, qkv_bias: bool = False, **changes
) -> Eagle3Drafter:
    """Random, as it is stored, of rows in an order that is not that of their ids."""
    torch.manual_seed(1)
    rope = RopeConfig(theta=500.0, type="llama3", factor=2.0, original_max_position=32)
    shape = replace(LayerShape.of(target.config), rope=rope, qk_norm=qk_norm, window=window, qkv_bias=qkv_bias)
    config = Eagle3Config(SIZE, VOCAB, ROWS, target_layers=(2, 3, 5), layer=shape, **changes)
    drafter = Eagle3Drafter(config, target, torch.randperm(VOCAB)[:ROWS]).eval().requires_grad_(False)
    for weight in drafter.parameters():
        weight.normal_(0, 0.3).copy_(weight.bfloat16())
    return drafter


def same_weights(found: Eagle3Drafter, expected: Eagle3Drafter) -> None:
    order = expected.hot_ids.argsort()
    assert torch.equal(found.hot_ids, expected.hot_ids[order])
    weights = expected.state_dict()
    weights["own_head.weight"] = expected.head_weight.bfloat16().float()[order]
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in found.state_dict().items())


@pytest.mark.parametrize(
    ("form", "head", "biases"),
    [
        ("speculators", "own", False),
        ("specforge", "own", False),
        ("speculators", "target", False),
        ("specforge", "own", True),
    ],
)
@torch.no_grad()
def test_what_loaders_require_is_there_and_reads_back(target, model, tmp_path, form, head, biases):
    """A head that is the target's is written too, since SGLang and TensorRT-LLM require one."""
    drafter = drafter_of(target, qkv_bias=biases, head=head)
    drafter.save(tmp_path / "ours")
    done = run("--model", model, "--drafter", tmp_path / "ours", "--output", tmp_path / "out", "--format", form)
    assert done.exit_code == 0, done.output
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = {f"{FIRST[form]}.{name}": shape for name, shape in (LAYER | (BIASES if biases else {})).items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHARED | layer
    if biases:
        assert not tensors["midlayer.self_attn.o_proj.bias"].any()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert FIELDS[form] <= {field for field, value in raw.items() if value is not None}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert tensors["t2d"].nonzero().flatten().tolist() == (torch.arange(ROWS) + tensors["d2t"]).tolist()
    back = load_drafter(tmp_path / "out", target)
    assert (back.feature_layers, back.layer_config) == ((2, 3, 5), drafter.layer_config)
    same_weights(back, drafter)
    if form == "specforge":
        yaml = (tmp_path / "out" / "speculative_config.yaml").read_text()
        assert yaml.startswith("# trtllm-serve ")
        assert yaml.endswith(f"\n{TRTLLM_YAML}")


@torch.no_grad()
def test_what_only_speculators_form_says_reads_back(target, model, tmp_path):
    changes = {"num_layers": 2, "fuse_norm": "each", "norm_output": True, "norm_before_residual": True}
    drafter = drafter_of(target, qk_norm=True, window=9, **changes)
    drafter.save(tmp_path / "ours")
    options = ["--model", model, "--drafter", tmp_path / "ours", "--output", tmp_path / "out"]
    assert run(*options, "--verifier", "a/b", "--depth", 4).exit_code == 0
    back = load_drafter(tmp_path / "out", target)
    assert replace(back.config, layer=None) == replace(drafter.config, layer=None)
    assert back.layer_config == drafter.layer_config
    same_weights(back, drafter)
    given = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert (given["verifier"]["name_or_path"], given["proposal_methods"][0]["speculative_tokens"]) == ("a/b", 4)
    done = run(*options, "--format", "specforge")
    beyond = "norm_before_residual, norm_output, num_layers 2, norms of heads, sliding windows"
    assert f"SpecForge's form has no {beyond}" in " ".join(done.output.split())


YARN = {"original_max_position": 32, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": 1.1}


@pytest.mark.parametrize(
    ("rope", "written"),
    [
        (RopeConfig(500.0, "yarn", 4.0, **YARN), "default"),
        (RopeConfig(500.0, share=0.5), "default"),
        (RopeConfig(500.0, "llama3", 2.0), "llama3"),
    ],
)
@torch.no_grad()
def test_drafters_of_targets_with_any_rope_are_written(target, model, tmp_path, rope, written):
    """Trained layers have the target's RoPE only where these forms can say it."""
    scaled = random_model(replace(target.config, rope=rope))
    drafter = Eagle3Drafter(Eagle3Drafter.configure(scaled, settings={"target_layers": "2+3+5"}), scaled)
    drafter.save(tmp_path / "ours")
    done = run("--model", model, "--drafter", tmp_path / "ours", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = load_drafter(tmp_path / "out", target).layer_config.rope
    assert (found.theta, found.type, found.share) == (500.0, written, None)


def test_an_answer_settles_what_a_folder_of_the_hub_leaves_open(target, model, tmp_path):
    folder = speculators(norm_before_residual=None).write(tmp_path / "theirs")
    options = ["--model", model, "--drafter", folder, "--output", tmp_path / "out"]
    assert "give --read-as norm_before_residual=true" in " ".join(run(*options).output.split())
    assert run(*options, "--read-as", "norm_before_residual=true").exit_code == 0
    assert load_drafter(tmp_path / "out", target).config.norm_before_residual


def parallel(target: Target) -> ParallelEagle3Drafter:
    """P-EAGLE's, whose mask these forms do not have."""
    config = ParallelEagle3Config(SIZE, VOCAB, target_layers=(2, 3, 5), mask_token=7)
    return ParallelEagle3Drafter(config, target)


@pytest.mark.parametrize(("make", "name"), [(tiny_drafter, "recurrent"), (parallel, "parallel_eagle3")])
def test_other_drafters_are_refused(target, model, tmp_path, make, name):
    make(target).save(tmp_path / "ours")
    done = run("--model", model, "--drafter", tmp_path / "ours", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert f"holds a drafter {name!r}, exported are 'eagle3'" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_models_folder_is_not_replaced(target, model, tmp_path):
    drafter_of(target).save(tmp_path / "ours")
    done = run("--model", model, "--drafter", tmp_path / "ours", "--output", model)
    assert done.exit_code == 1
    assert "holds other files, which would be deleted" in " ".join(done.output.split())
    assert (model / "tokenizer.json").exists()
