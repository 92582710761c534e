"""Fields, tensors and files that no reader knows are refused, and so are fields that are missing or of another type: in
one line that says which."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from redraft.model_defs.drafters.hub.readers import read
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from tests.model_defs.drafters.hub.forms import (
    HIDDEN,
    VOCAB,
    Form,
    block_speculators,
    dflash,
    dspark,
    eagle,
    medusa,
    modelopt,
    modelopt_dspark,
    peagle,
    specforge,
    speculators,
    windowed,
)
from tests.model_defs.drafters.hub.test_readers import target_of


def redrafter() -> Form:
    """Apple's."""
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "exit_dim": 2 * HIDDEN, "num_draft_layers": 1, "rnn": True}
    tensors = {
        "rnn_u.weight": torch.randn(HIDDEN, HIDDEN),
        "rnn_w.weight": torch.randn(HIDDEN, HIDDEN),
        "lm_head.0.linear.weight": torch.randn(2 * HIDDEN, 2 * HIDDEN),
        "lm_head.0.linear.bias": torch.randn(2 * HIDDEN),
        "lm_head.1.weight": torch.randn(VOCAB, 2 * HIDDEN),
    }
    return Form(config, tensors)


SPECULATORS_CONFIG = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}],
    "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
}
FORMS: dict[str, Callable[[], Form]] = {
    "ReDrafter": redrafter,
    "EAGLE-1": eagle,
    "Medusa": medusa,
    "SpecForge": lambda: specforge(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "ModelOpt": modelopt,
    "speculators": lambda: speculators(speculators_config=SPECULATORS_CONFIG),
    "P-EAGLE": peagle,
    "DFlash": dflash,
    "DSpark": lambda: dspark(sample_from_anchor=True),
    "DSpark of ModelOpt": modelopt_dspark,
    "DSpark of speculators": lambda: windowed(
        block_speculators("dspark", sample_from_anchor=True, sliding_window_non_causal=True), 9
    ),
}
WRONG: list[Any] = ["text", -1, float("nan"), [1.5], {"a": 1}]
MISSING = object()
CHANGES_NOTHING = {
    "transformers_version": "5.0",
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "id2label": {"0": "LABEL_0"},
    "quantization_config": {"quant_method": "none"},
    "something": None,
    "logit_scale": 1.0,
    "eos_token_id": [1, 2],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(7)


def objects(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration, and the objects within it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from objects(value)


def changed(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every field with another value, or none: its name, that value, and the whole configuration with it."""
    for index, part in enumerate(objects(config)):
        for name in part:
            for value in (MISSING, *WRONG):
                whole = copy.deepcopy(config)
                own = list(objects(whole))[index]
                own.pop(name) if value is MISSING else own.update({name: value})
                yield name, value, whole


def refusal(folder: Path, target: Target) -> str:
    """Why a folder is refused, in one line and without the folder; nothing where it is read."""
    try:
        load_drafter(folder, target)
    except ValueError as error:
        return str(error).removeprefix(str(folder))
    return ""


@pytest.mark.parametrize("name", FORMS)
def test_wrong_fields_are_read_or_refused_in_one_line(target, tmp_path, name):
    form = FORMS[name]()
    assert not refusal(form.write(tmp_path), target)
    for field, value, config in changed(form.config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        message = refusal(tmp_path, target)
        assert not message or ("\n" not in message and len(message.split()) > 4), (field, value, message)


@pytest.mark.parametrize("name", FORMS)
def test_missing_tensors_are_named(target, tmp_path, name):
    form = FORMS[name]()
    (tmp_path / "config.json").write_text(json.dumps(form.config))
    for missing in form.tensors:
        save_file({name: x for name, x in form.tensors.items() if name != missing}, tmp_path / "model.safetensors")
        message = refusal(tmp_path, target)
        assert not message or ("\n" not in message and len(message.split()) > 4), (missing, message)


@pytest.mark.parametrize("name", FORMS)
def test_what_no_reader_knows_is_refused(target, tmp_path, name):
    """In every object of the configuration that is not the target's. What changes nothing is read, and an answer says
    that something changes nothing."""
    form = FORMS[name]()
    parts = [part for part in objects(form.config) if not {"rope_type", "name_or_path"} & part.keys()]
    for part in parts:
        part |= CHANGES_NOTHING
    read(form.write(tmp_path), target.config, {})
    for part in parts:
        part["swiglu_limit"] = 7
        form.write(tmp_path)
        with pytest.raises(ValueError, match=r"config\.json says \S*swiglu_limit 7, which .* does not know") as refused:
            read(tmp_path, target.config, {})
        whole = str(refused.value).split("ignore=")[1]
        assert read(tmp_path, target.config, {"ignore": whole})
        del part["swiglu_limit"]
    form.tensors["extra.weight"] = torch.ones(3)
    form.write(tmp_path)
    with pytest.raises(ValueError, match=r"extra\.weight"):
        read(tmp_path, target.config, {})


AS_PUBLISHED: dict[str, tuple[Callable[[], Form], dict[str, Any]]] = {
    "RedHat's EAGLE-3": (
        lambda: speculators(speculators_config=SPECULATORS_CONFIG),
        {
            "has_no_defaults_at_init": False,
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "base_model_ep_plan": None,
        }
        | {"speculators_version": "0.1.0.dev42", "embed_requires_grad": False, "enable_sp_ulysses": False},
    ),
    "AngelSlim's EAGLE-3 for Qwen2.5": (
        specforge,
        {"use_mrope": False, "num_hidden_layers": 28, "sliding_window": 131072, "max_window_layers": 28},
    ),
    "DFlash of speculators": (
        lambda: block_speculators("dflash"),
        {"projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "auf": False}
        | {"lambda_base_start": 1.0, "lambda_base_decay_ratio": 1.0, "shift_label": False},
    ),
    "DSpark of speculators": (
        lambda: block_speculators("dspark", sample_from_anchor=True),
        {"markov_rank": 6, "ce_loss_alpha": 1.0, "l1_loss_alpha": 0.0, "confidence_head_alpha": 0.0},
    ),
}
"""Fields that published folders have, beside those of the forms"""


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_what_published_folders_say_is_read(target, tmp_path, name):
    make, fields = AS_PUBLISHED[name]
    form = make()
    form.config |= fields
    read(form.write(tmp_path), target.config, {})


def test_files_that_no_reader_knows_are_refused(target, tmp_path):
    folder = modelopt().write(tmp_path)
    for name in (
        "configuration.json",
        "train_config.json",
        "latest",
        "README.md",
        "LICENSE",
        ".gitattributes",
        "tokenizer.json",
        "training_args.bin",
        "pytorch_model.bin",
    ):
        (folder / name).write_text("changes nothing")
    load_drafter(folder, target)
    (folder / "embeddings.pt").write_text("")
    with pytest.raises(ValueError, match=r"has a file embeddings\.pt, which .* does not know.*ignore=embeddings\.pt"):
        load_drafter(folder, target)
    load_drafter(folder, target, {"ignore": "embeddings.pt"})
    with pytest.raises(ValueError, match=r"ignore=rope: .* has no such field in config"):
        load_drafter(folder, target, {"ignore": "embeddings.pt+rope"})


def test_modelopts_lora_of_the_target_is_refused(target, tmp_path):
    folder = modelopt().write(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has adapter_config\.json: the drafter was trained for .* with this LoRA"):
        load_drafter(folder, target)
    load_drafter(folder, target, {"ignore": "adapter_config.json+adapter_model.safetensors"})


def two_heads(form: Form) -> Form:
    """With the embedding as head, and a head of its own."""
    form.config["tie_word_embeddings"] = True
    return form


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specforge(target_layer_ids=[0, 2, 4], eagle_config={"layer_ids": [2, 3, 4]}), "names other layers in"),
        (lambda: specforge(norm_before_fc=True, fc_norm=True), "says norm_before_fc and fc_norm, expected one"),
        (lambda: two_heads(specforge()), "says tie_word_embeddings true, by which SGLang drafts"),
        (lambda: dflash(markov_rank=6), "says markov_rank 6, and markov_head.markov_w1.weight is missing"),
        (
            lambda: specforge(intermediate_size=2**19),
            r"gate_up of layer have shape \(80, 24\), by config\.json expected",
        ),
    ],
)
def test_what_would_be_read_otherwise_is_refused(target, tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(make().write(tmp_path), target)
