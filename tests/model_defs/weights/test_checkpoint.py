"""Quantized safetensors of a folder: the same numbers as floats and in blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.model_defs.files import SINGLE
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import count_numbers
from tests.engines.tiny import random_model, tiny_target, write_model
from tests.model_defs.weights.layouts import TENSORS, awq, compressed, gptq, group_of, quantize, scaled
from tests.model_defs.weights.test_blocks import whole

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
PACKED = {
    "quant_method": TENSORS,
    "format": "pack-quantized",
    "config_groups": group_of(4, symmetric=False, group_size=32),
}
SCALED = {"quant_method": TENSORS, "format": "int-quantized", "config_groups": group_of(8)}


def by_width(weight: Tensor) -> Tensor:
    """An order of features that all weights of a width share, as those do that multiply the same rows."""
    width = weight.shape[1]
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4}, lambda w: awq(w, 96), "i4g96"),
    "gptq": (GPTQ, lambda w: gptq(w, 4, 1, 64, torch.arange(w.shape[1])), "i4g64"),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, lambda w: gptq(w, 8, 1, 64, torch.arange(w.shape[1])), "i8g64"),
    "gptq of 2 bits": (GPTQ | {"bits": 2}, lambda w: gptq(w, 2, 1, 64, torch.arange(w.shape[1])), "i4g64"),
    "act-order": (GPTQ, lambda w: gptq(w, 4, 1, 64, by_width(w)), "i4g64"),
    "packed": (PACKED, lambda w: compressed(w, 4, symmetric=False, size=32), "i4g32"),
    "int8": (SCALED, lambda w: scaled(w, torch.int8), "i8g96"),
}


def write_folder(folder, settings, write, intermediate_size=208, **changes):
    """The tiny target, quantized; its layers multiply rows of 96 and of so many features."""
    config = dataclasses.replace(tiny_target().config, intermediate_size=intermediate_size, **changes)
    write_model(random_model(config), folder)
    return quantize(folder, settings, write)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_as_floats_and_in_blocks(tmp_path, name):
    settings, write, form = FORMATS[name]
    plain = write_folder(tmp_path, settings, write, 192 if name == "awq" else 208)
    exact, target = Target.from_folder(tmp_path), Target.from_folder(tmp_path, in_blocks=True, float_ends=False)
    assert torch.equal(exact.layers[1].down.weight, plain["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(exact.embedding.weight, plain["model.embed_tokens.weight"])
    assert count_numbers(tmp_path) == sum(weight.numel() for weight in plain.values())
    products = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("qkv", "attention_out", "gate_up", "down")]
    for product in products:
        np.testing.assert_array_equal(
            whole(target.blocks, product), exact.get_parameter(product).numpy(), err_msg=product
        )
        assert (target.blocks.matrices(product)[0][0].feature_order is None) == (name != "act-order")
    assert target.blocks.matrices(products[0])[0][0].form.name == form
    assert not target.blocks.unread
    assert not target.blocks.widened
    for floats in ("embedding.weight", "lm_head.weight", "norm.weight", "layers.0.qkv.bias"):
        assert floats not in target.blocks
        assert torch.equal(target.get_parameter(floats), exact.get_parameter(floats))
    assert target_fingerprint(target) == target_fingerprint(exact)


def test_matrices_beside_quantized_ones_are_bfloat16_where_no_dtype_is_asked_for(tmp_path):
    write_folder(tmp_path, GPTQ, FORMATS["gptq"][1])
    weights = load_file(tmp_path / SINGLE)
    save_file({name: x.half() if x.is_floating_point() else x for name, x in weights.items()}, tmp_path / SINGLE)
    target = Target.from_folder(tmp_path, None)
    dtypes = {weight.dtype for weight in target.parameters() if weight.ndim == 2}
    assert dtypes == {torch.bfloat16}
    assert target.norm.weight.dtype == torch.float32


def test_products_whose_parts_have_several_orders_are_floats(tmp_path):
    """q, k and v of one product multiply the same rows."""
    write_folder(tmp_path, GPTQ, lambda w: gptq(w, 4, 1, 64, None if len(w) == 32 else by_width(w)))
    target, exact = Target.from_folder(tmp_path, in_blocks=True), Target.from_folder(tmp_path)
    assert "layers.0.qkv.weight" not in target.blocks
    assert "layers.0.gate_up.weight" in target.blocks
    assert torch.equal(target.layers[0].qkv.weight, exact.layers[0].qkv.weight)
    parts = {f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkv"}
    assert target.blocks.widened == dict.fromkeys(parts, "GPTQ, 4 bits")


def test_scales_that_are_not_finite_are_named(tmp_path):
    write_folder(tmp_path, GPTQ, FORMATS["gptq"][1])
    weights = load_file(tmp_path / SINGLE)
    weights["model.layers.1.mlp.down_proj.scales"][0, 3] = torch.inf
    save_file(weights, tmp_path / SINGLE)
    target = Target.from_folder(tmp_path, in_blocks=True)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        whole(target.blocks, "layers.1.down.weight")


def test_a_quantization_that_is_not_read_is_named(tmp_path):
    write_folder(tmp_path, {"quant_method": "bitsandbytes"}, lambda w: {"weight": w})
    with pytest.raises(ValueError, match=r"config\.json: unsupported quantization 'bitsandbytes'"):
        Target.from_folder(tmp_path)
