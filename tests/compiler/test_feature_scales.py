"""Scales of features change what is rounded, and not a bit of what a float target computes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from redraft.bundle.manifest import Bundle
from redraft.cli import build
from redraft.compiler import feature_scales
from redraft.compiler.feature_scales import (
    LARGEST_EXPONENT,
    LEAST_EXPONENT,
    best_scales,
    calibration_texts,
    fold,
    rounding_error,
    run_layer,
    scalable,
    scale_features,
    value_heads,
)
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.plugins.operators.linear.blocks import BlockWeight
from tests.cli.commands import invoke
from tests.engines.tiny import LAYERS, grouped_target, tiny_lm, tiny_of, tiny_target, write_model

TEXTS = [[5, 9, 2, 77, 31], [110], [8, 44, 3]]
TARGETS = {
    "three KV groups": grouped_target,
    "tiny LM": tiny_lm,
    "GELU without a gate": lambda: tiny_of("opt", activation="gelu"),
    **{name: lambda name=name: tiny_of(name) for name in LAYERS},
}


def logits_of(target: Target, texts: list[list[int]] = TEXTS) -> Tensor:
    """Logits of all texts' rows, one after the other."""
    return torch.cat(
        [target.lm_head(target(torch.tensor([ids]), causal_attend(target.config, len(ids))).hidden)[0] for ids in texts]
    )


def uneven(target: Target) -> Target:
    """The target with norms whose features' magnitudes differ by orders."""
    for layer in target.layers:
        for weight in (layer.attention_norm.weight, layer.mlp_norm.weight):
            weight.mul_(torch.logspace(-1.5, 1.5, len(weight))[torch.randperm(len(weight))])
    return target


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_computes_the_same_bits(name):
    """Of every family, whatever the scales; each product's columns have them."""
    target = TARGETS[name]()
    scaled, rng = deepcopy(target), np.random.default_rng(0)
    for index, layer in enumerate(scaled.layers):
        for product in scalable(target.config):
            columns = getattr(layer, product).in_features
            shape = value_heads(target.config) if product == "attention_out" else (1, 1, columns)
            scales = torch.from_numpy(2.0 ** rng.integers(-4, 5, (shape[0], 1, shape[2]))).float()
            fold(layer, product, scales)
            changed = getattr(layer, product).weight / getattr(target.layers[index], product).weight
            assert torch.equal(changed, changed[:1].expand_as(changed))
            assert set(changed[0].tolist()) == set(scales.flatten().tolist())
    assert torch.equal(logits_of(scaled), logits_of(target))


@pytest.mark.parametrize("name", TARGETS)
def test_rounding_moves_the_results_of_products_less(name):
    torch.manual_seed(3)
    target = uneven(TARGETS[name]())
    scaled, layers = deepcopy(target), []
    scale_features(scaled, TEXTS, lambda: layers.append(len(layers)))
    assert len(layers) == target.config.num_layers
    assert torch.equal(logits_of(scaled), logits_of(target))
    assert not any(module._forward_pre_hooks for module in scaled.modules())
    attends = [causal_attend(target.config, len(ids)) for ids in TEXTS]
    states = [target.embed(torch.tensor([ids])) for ids in TEXTS]
    ratios = []
    for index, layer in enumerate(target.layers):
        states, inputs = run_layer(layer, index, states, attends)
        for product, rows in inputs.items():
            weight, changed = (getattr(model.layers[index], product).weight for model in (target, scaled))
            before, after = (
                rounding_error(weight, rows, scale) for scale in (torch.ones(rows.shape[1]), changed[0] / weight[0])
            )
            ratios.append(after / before)
    assert max(ratios) < 1.1, "not all rows are judged"
    assert np.mean(ratios) < 0.95


def test_what_products_take_is_of_all_texts():
    target = tiny_lm()
    attends = [causal_attend(target.config, len(ids)) for ids in TEXTS]
    states = [target.embed(torch.tensor([ids])) for ids in TEXTS]
    after, inputs = run_layer(target.layers[0], 0, states, attends)
    assert list(inputs) == ["qkv", "attention_out", "gate_up", "down"]
    rows = target.layers[0].attention_norm(target.embed(torch.tensor([token for ids in TEXTS for token in ids])))
    torch.testing.assert_close(inputs["qkv"], rows)
    torch.testing.assert_close(after[2], target.layers[0](states[2], 0, attends[2]))


def test_the_scale_that_moves_results_least_is_chosen():
    torch.manual_seed(0)
    weight, inputs = torch.randn(48, 111), torch.randn(200, 111).sign()
    assert torch.equal(best_scales(weight, inputs), torch.ones(1, 1, 111)), "features of one magnitude"
    inputs[:, [3, 40, 41]] *= 50
    scales = best_scales(weight, inputs)
    assert torch.equal(scales.log2(), scales.log2().round())
    assert float(scales.log2().max()) <= LARGEST_EXPONENT
    assert float(scales[0, 0, 3] / scales[0, 0, 0]) > 2
    assert rounding_error(weight, inputs, scales.flatten()) < 0.7 * rounding_error(weight, inputs, torch.ones(111))


def test_features_that_the_texts_leave_silent_or_rare_are_rounded_as_finely():
    """Other texts may have them: a silent one keeps its scale, a rare one is at most four times coarser."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(48, 111), torch.randn(200, 111).sign()
    inputs[:, [30, 40, 41]] *= 50
    inputs[:, 3] = 0
    inputs[1:, 7] = 0
    scales = best_scales(weight, inputs)[0, 0]
    assert scales.max() > 2
    assert scales[3] == 1
    assert scales.min() == scales[7] == 2.0**LEAST_EXPONENT == 0.25
    assert torch.equal(best_scales(weight, torch.zeros(4, 111)), torch.ones(1, 1, 111))


def test_what_is_held_in_4_bits_already_stays():
    torch.manual_seed(0)
    exact = torch.from_numpy(BlockWeight.quantized(torch.randn(48, 111).numpy(), "int4").dequantized())
    inputs = torch.randn(200, 111) * torch.logspace(-2, 2, 111)
    assert torch.equal(best_scales(exact, inputs), torch.ones(1, 1, 111))


def test_query_heads_that_read_a_value_head_share_its_scales():
    """Three value heads, the features of one of which are large, each read by two query heads."""
    torch.manual_seed(0)
    heads = (3, 2, 5)
    inputs = torch.randn(70, *heads)
    inputs[:, 1, :, 4] *= 100
    scales = best_scales(torch.randn(40, 30), inputs.flatten(1), heads)
    assert scales.shape == (3, 1, 5)
    large = scales == scales.max()
    assert large.sum() == 1
    assert large[1, 0, 4]


def test_the_same_texts_give_the_same_scales():
    first, second = tiny_target(), tiny_target()
    for target in (first, second):
        scale_features(target, TEXTS)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_texts_hold_what_the_target_has_rows_and_positions_for(tmp_path, monkeypatch):
    """A tokenizer or a template may have tokens beyond the embedding's rows."""
    target = tiny_target()
    write_model(target, tmp_path)
    config = replace(target.config, max_position=4)
    turns = iter([[111, 5, 110, 200, 2, 3, 4], [300]] + [[7]] * 6)
    monkeypatch.setattr(feature_scales, "encode_user_turn", lambda *_: next(turns))
    assert calibration_texts(tmp_path, config) == [[5, 110, 2, 3], *[[7]] * 6]


def test_a_build_with_4_bits_scales(tmp_path):
    """By prompts that come with the package. The fingerprint is that of the model."""
    model = tmp_path / "model"
    write_model(tiny_target(), model)
    options = ["--model", model, "--no-drafter", "--precision", "int4", "--slots", 1, "--max-len", 40]
    done = invoke(build.main, *options, "--max-tree", 8, "--prefill-chunk", 16, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "scale features: 2 layers" in done.output
    assert Bundle.load(tmp_path / "b").manifest.target_fingerprint == target_fingerprint(Target.from_folder(model))
