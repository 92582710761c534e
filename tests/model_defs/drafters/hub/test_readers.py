"""Drafters of the hub's forms compute what each form's definition says, or are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.context_drafter import ContextDrafter
from redraft.model_defs.drafters.medusa import MedusaDrafter
from redraft.model_defs.drafters.registry import hub_form, kind_of, load_drafter
from redraft.model_defs.target.attention import DenseCache, causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from tests.model_defs.drafters.hub.forms import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    Form,
    eagle,
    eagle3_logits,
    eagle_logits,
    feeding_back,
    medusa,
    medusa_logits,
    modelopt,
    modelopt_without_head,
    norm_before_fc,
    reading,
    specforge,
    specforge_3_1,
    speculators,
    windowed,
    with_head_norms,
)

TEXT, PATH = [5, 98, 6, 60, 17], [88, 3, 109]
"""The text with its root, and drafted tokens below it."""


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(7)


def target_of(layers: int) -> Target:
    torch.manual_seed(0)
    target = Target(TargetConfig(VOCAB, HIDDEN, 40, layers, 6, 2, 4, 1e-5, RopeConfig(), 64, False, False, (2,)))
    for parameter in target.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return target.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def entering(target: Target, layer: int, tokens: list[int]) -> Tensor:
    """What enters a layer of the target: the layers before it."""
    attend, x = causal_attend(target.config, len(tokens)), target.embedding(torch.tensor([tokens]))
    for index in range(layer):
        x = target.layers[index](x, index, attend)
    return x[0]


def drafted(drafter: Drafter, features: Tensor) -> Tensor:
    """A drafter's logits after TEXT and each token of PATH, from features [n, H] of the target."""
    assert isinstance(drafter, ContextDrafter)
    cache = DenseCache(drafter.layer_config, 1, 40, features)
    state = drafter.ingest(features[None], torch.tensor([TEXT[1:]]), cache.attend)[:, -1:]
    cache.starts += len(features)
    found = [state]
    for token in PATH:
        found.append(drafter.grow(found[-1], torch.tensor([[token]]), cache.attend))
        cache.starts += 1
    return drafter.read(torch.cat(found, dim=1))[0] @ drafter.head_weight.T


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("change", ["", "no bias", "own embedding", "own head", "biases of the layer"])
@torch.no_grad()
def test_eagle_1(target, tmp_path, prefix, change):
    form, embedding, head = eagle(), target.embedding.weight, target.lm_head.weight
    if change == "no bias":
        del form.tensors["fc.bias"]
    if change == "own embedding":
        embedding = form.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    if change == "own head":
        head = torch.randn(VOCAB, HIDDEN)
    hidden = target(torch.tensor([TEXT[:-1]]), causal_attend(target.config, 4)).hidden[0]
    expected = eagle_logits(form, embedding, head, hidden, TEXT[1:], PATH)
    if change == "biases of the layer":  # zeros, which the reference leaves out
        for p, size in (("q", 128), ("k", 64), ("v", 64)):
            form.tensors[f"layers.0.self_attn.{p}_proj.bias"] = torch.zeros(size)
        form.tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    form.tensors |= {"lm_head.weight": head.clone()}
    form.tensors = {
        name if name.startswith("lm_head") else prefix + name: tensor for name, tensor in form.tensors.items()
    }
    drafter = load_drafter(form.write(tmp_path), target, {"own_head": "true"} if change == "own head" else {})
    assert drafter.name == kind_of(tmp_path) == "eagle"
    assert_equal(drafted(drafter, hidden), expected)
    if change == "own embedding":
        drafter.save(tmp_path / "ours")
        assert (load_drafter(tmp_path / "ours", target).embedding - embedding).abs().max() < 0.02


@torch.no_grad()
def test_copies_of_the_targets_embedding_and_head_are_not_kept(tmp_path):
    """In float16, which the target's were rounded from when it was fetched."""
    target, form = target_of(7), eagle()
    for name, weight in (("embed_tokens", target.embedding.weight), ("lm_head", target.lm_head.weight)):
        form.tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN).half()
        weight.copy_(form.tensors[f"{name}.weight"].bfloat16())
    drafter = load_drafter(form.write(tmp_path), target)
    assert not drafter.owns_embedding
    assert drafter.head_weight is drafter.head_rows


@pytest.mark.parametrize("beside_target", [False, True])
@torch.no_grad()
def test_medusa(target, tmp_path, beside_target):
    """One file of torch's format, without a norm or the target's head, or heads in the target's checkpoint; depth d
    reads head d. Published configurations count otherwise."""
    form = medusa()
    if beside_target:
        model = {"model.embed_tokens.weight": target.embedding.weight, "lm_head.weight": target.lm_head.weight}
        heads = {f"medusa_head.{name}": tensor for name, tensor in form.tensors.items()}
        Form({"model_type": "llama"}, model | heads).write(tmp_path)
        assert kind_of(tmp_path) == "medusa"
    else:
        published = {"medusa_num_heads": 2, "medusa_num_layers": 0}
        Form(form.config | published, form.tensors).write(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save(form.tensors, tmp_path / "medusa_lm_head.pt")
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, MedusaDrafter)
    assert len(drafter.heads) == 3
    hidden, expected = torch.randn(HIDDEN), None
    expected = medusa_logits(form, hidden)
    paths = drafter.paths(None, hidden[None], torch.tensor([9]))
    for depth in range(3):
        assert_equal(drafter.heads[depth](hidden) @ drafter.head_at(depth).T, expected[depth])
        values, ids = paths.most_likely(4)
        best = expected[depth].log_softmax(-1).topk(4)
        torch.testing.assert_close(values[0], best.values, atol=1e-3, rtol=1e-3)
        assert ids[0].tolist() == best.indices.tolist()
        paths = type(paths)(drafter, paths.features, None, depth + 1)


EAGLE3: dict[str, Callable[[], Form]] = {
    "SpecForge": specforge,
    "SpecForge, all tokens": lambda: all_tokens(specforge()),
    "SpecForge, another number of layers and fields that change nothing": lambda: specforge(
        num_hidden_layers=32, logit_scale=1.0, final_logit_softcapping=None
    ),
    "SpecForge 3.1": specforge_3_1,
    "SpecForge, usual ids outside of eagle_config": lambda: specforge(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
    "ModelOpt": modelopt,
    "ModelOpt, the target's head": modelopt_without_head,
    "speculators": speculators,
    "speculators, residual after the norm": lambda: speculators(norm_before_residual=True),
    "speculators, two layers": lambda: speculators(others=1, norm_output=True),
    "speculators, norm before fc": lambda: speculators(norm_before_fc=True),
    "speculators, layers of Qwen3": lambda: with_head_norms(speculators(others=1)),
    "SpecForge, norm before fc": lambda: norm_before_fc(specforge(norm_before_fc=True), 3),
    "ModelOpt, norm before fc": lambda: norm_before_fc(modelopt(norm_before_fc=True), 2),
    "ModelOpt, states after the norm": lambda: feeding_back(modelopt(return_hidden_post_norm=True)),
    "SpecForge, states after the norm": lambda: feeding_back(specforge(eagle_config={"return_hidden_post_norm": True})),
    "SpecForge, layer ids of DeepSpec": lambda: reading(specforge(target_layer_ids=[0, 2, 4]), 1, 3, 5),
    "SpecForge, layer ids of vLLM": lambda: reading(specforge(eagle_config={"layer_ids": [1, 3, 5]}), 1, 3, 5),
    "speculators, windows": lambda: windowed(speculators(others=1), 3),
}


def all_tokens(form: Form) -> Form:
    del form.tensors["d2t"], form.tensors["t2d"]
    form.tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    return form


@pytest.mark.parametrize("name", EAGLE3)
@torch.no_grad()
def test_eagle_3(target, tmp_path, name):
    """From tokens to logits: the target gives the fused features of the right layers."""
    form = EAGLE3[name]()
    drafter = load_drafter(form.write(tmp_path), target)
    assert (kind_of(tmp_path), name.split(",")[0].split()[0] in hub_form(tmp_path)) == ("eagle3", True)
    form.tensors.setdefault("lm_head.weight", target.lm_head.weight)
    assert drafter.feature_layers == form.layers
    reader = target_of(7)
    reader.feature_readers.append(drafter.feature_reader())
    features = reader(torch.tensor([TEXT[:-1]]), causal_attend(target.config, 4)).features[0]
    assert features.shape == (4, HIDDEN)
    inputs = [entering(target, layer, TEXT[:-1]) for layer in form.layers]
    expected = eagle3_logits(form, target.embedding.weight, inputs, TEXT[1:], PATH)
    found = drafted(drafter, features)
    assert_equal(found, expected)
    if "d2t" in form.tensors:
        assert drafter.hot_ids.tolist() == [i + int(offset) for i, offset in enumerate(form.tensors["d2t"])]
        assert len(drafter.hot_ids) == DRAFT_VOCAB
    assert_equal(drafter.fuse(torch.cat(inputs, dim=-1)), features)


@torch.no_grad()
def test_eagle_3_with_its_embedding_as_head(target, tmp_path):
    form = all_tokens(specforge(tie_word_embeddings=True, draft_vocab_size=VOCAB))
    del form.tensors["lm_head.weight"]
    form.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    drafter = load_drafter(form.write(tmp_path), target)
    form.tensors["lm_head.weight"] = form.tensors["embed_tokens.weight"]
    inputs = [entering(target, layer, TEXT[:-1]) for layer in form.layers]
    expected = eagle3_logits(form, target.embedding.weight, inputs, TEXT[1:], PATH)
    assert_equal(drafted(drafter, drafter.fuse(torch.cat(inputs, dim=-1))), expected)


def ids_outside() -> Form:
    """Of layer ids where projects do not agree what they count."""
    return specforge(eagle_aux_hidden_state_layer_ids=[1, 2, 3])


def other_head() -> Form:
    """EAGLE-1 with a head of fewer rows, which nobody reads."""
    form = eagle()
    form.tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB, HIDDEN)
    return form


@pytest.mark.parametrize(
    ("form", "answers", "expected"),
    [
        (speculators, {"norm_before_residual": "true"}, {"norm_before_residual": True}),
        (specforge, {"norm_output": "true"}, {"norm_output": True}),
        (speculators, {"target_layers": "2+3+4"}, {"target_layers": (2, 3, 4)}),
        (ids_outside, {"target_layers": "1+2+3"}, {"target_layers": (1, 2, 3)}),
        (other_head, {"own_head": "false"}, {"head": "target"}),
    ],
)
def test_answers_settle_what_a_folder_leaves_open(target, tmp_path, form, answers, expected):
    changes: dict[str, Any] = {"norm_before_residual": None} if "norm_before_residual" in answers else {}
    config = load_drafter(form(**changes).write(tmp_path), target, answers).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        (lambda: speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), {}),
        (lambda: speculators(eagle_aux_hidden_state_layer_ids=None), {"target_layers": "1+2+4"}),
        (specforge, {"target_layers": "1+2+4"}),
    ],
)
def test_small_targets_are_read_by_the_layers_that_are_named(tmp_path, form, answers):
    assert load_drafter(form().write(tmp_path), target_of(5), answers).feature_layers == (1, 2, 4)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("/tmp/never"),)


def test_code_in_a_file_of_weights_is_not_run(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(eagle().config))
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors, and reading it would run its code"):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize("names", ["index", "pattern"])
def test_shards_in_torchs_format(target, tmp_path, names):
    expected = load_drafter(specforge().write(tmp_path), target).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    if names == "index":
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    found = load_drafter(tmp_path, target).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
