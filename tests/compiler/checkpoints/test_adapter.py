"""LoRA adapters against PEFT's own merge, weight by weight, and what is said of those that are not merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from redraft.compiler.checkpoints.fetch import Request
from redraft.compiler.checkpoints.fetch import fetch as fetch_model
from redraft.compiler.checkpoints.source import FetchError
from tests.compiler.checkpoints.tiny_llama import write_gguf
from tests.model_defs.target.references import write_reference

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 7}, "alpha_pattern": {"up_proj": 5}}
ROUNDING = 2**-8


def fetch(source: Path, adapter: Path, tmp_path: Path, name: str | None = None) -> Path:
    return fetch_model(Request(str(source), tmp_path / "models", tmp_path / "cache", name, adapter=adapter), print)


def train(source: Path, adapter: Path, **settings) -> dict[str, torch.Tensor]:
    """Save a random adapter, and give the weights of PEFT's own merge."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 6} | settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "bias")):
                weight.add_(torch.randn_like(weight) * 0.1)
    adapted.save_pretrained(adapter)
    return adapted.merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "mine"
    train(checkpoint, folder, target_modules=ALL)
    return folder


def assert_merged(folder: Path, merged: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight.float(), merged[name], rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ALL, "use_rslora": True},
        {"target_modules": ALL, **RANKS},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": r".*layers\.0.*_proj", "fan_in_fan_out": True},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_adapters_are_merged_as_peft_merges_them(checkpoint, tmp_path, settings):
    merged = train(checkpoint, tmp_path / "mine", **settings)
    folder = fetch(checkpoint, tmp_path / "mine", tmp_path)
    assert folder.name == "tiny-llama-mine"
    assert_merged(folder, merged)
    base = load_file(checkpoint / "model.safetensors")
    assert any(not torch.equal(weight.bfloat16(), merged[name].bfloat16()) for name, weight in base.items())
    record = json.loads((folder / "source.json").read_text())
    assert record["adapter"] == str((tmp_path / "mine").resolve())


@pytest.mark.parametrize("family", ["phi3", "opt", "smollm2"])
def test_families(checkpoint, tmp_path, family):
    """With biases, fused projections, and embeddings that are the head too, which `modules_to_save` unties."""
    write_reference(family, tmp_path / "base")
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, tmp_path / "base")
    settings = {"target_modules": "all-linear", "bias": "all" if family == "opt" else "none"}
    if family == "smollm2":
        settings["modules_to_save"] = ["lm_head", "embed_tokens"]
    merged = train(tmp_path / "base", tmp_path / "mine", **settings)
    folder = fetch(tmp_path / "base", tmp_path / "mine", tmp_path)
    assert_merged(folder, merged)
    if family == "smollm2":
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_adapter_for_a_gguf_file(checkpoint, reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference)
    merged = train(checkpoint, tmp_path / "mine", target_modules=ALL)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path / "mine", tmp_path)
    assert folder.name == "tiny-mine"
    assert_merged(folder, merged)


def test_the_plain_model_is_another_one(checkpoint, tmp_path):
    train(checkpoint, tmp_path / "mine", target_modules=ALL)
    fetch(checkpoint, tmp_path / "mine", tmp_path, "name")
    with pytest.raises(FetchError, match="choose another --name"):
        fetch_model(Request(str(checkpoint), tmp_path / "models", tmp_path / "cache", "name"), print)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3', expected 'LORA'"),
        ({"lora_bias": True}, "lora_bias True is not merged here"),
        ({"of_tomorrow": 1}, "of_tomorrow 1 is not merged here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the model's own weights"),
        ({"r": 4}, "has rank 3, and adapter_config.json says 4"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, expected a number"),
        ({"use_dora": True}, "use_dora and the lora_magnitude_vector of .* do not fit"),
    ],
)
def test_settings_that_are_not_merged_are_refused_by_name(checkpoint, trained, tmp_path, change, message):
    shutil.copytree(trained, tmp_path / "mine")
    file = tmp_path / "mine" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        fetch(checkpoint, tmp_path / "mine", tmp_path)
    assert not list((tmp_path / "models").iterdir()) if (tmp_path / "models").exists() else True


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}.lora_B.weight": None}, r"has no lora_B of model\.layers\.0\.self_attn\.q_proj\.weight"),
        ({f"{LAYER}.lora_A.weight": torch.ones(3, 31)}, r"A \(3, 31\) and B .* do not fit"),
        ({f"{LAYER}.lora_A.weight": torch.full((3, 32), float("nan"))}, "lora_A.weight holds NaN"),
        ({f"{LAYER}.x": torch.ones(2)}, r"holds model\.layers\.0\.self_attn\.q_proj\.x .*, and the model has none"),
        (
            {f"base_model.model.model.norm.lora_{part}.weight": torch.ones(3, 3) for part in "AB"},
            r"changes model\.norm\.weight, which is no matrix",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(checkpoint, trained, tmp_path, change, message):
    shutil.copytree(trained, tmp_path / "mine")
    file = tmp_path / "mine" / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | change).items() if tensor is not None}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        fetch(checkpoint, tmp_path / "mine", tmp_path)
