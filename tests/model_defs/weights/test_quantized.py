"""The layouts of quantized checkpoints: the numbers that they stand for, and the forms of their blocks."""

from __future__ import annotations

import pytest
import torch

from redraft.model_defs.weights.quantized import QuantizationError, QuantizedWeight, packed, quantization_of, scaled
from tests.model_defs.weights.layouts import TENSORS, group_of, pack, symmetric_gptq

SYMMETRIC = {"quant_method": "gptq", "bits": 4, "sym": True, "group_size": 16}


def test_a_block_may_be_larger_than_a_weight():
    stored = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.full((1, 1), 3.0)}
    assert torch.equal(scaled(stored.get, [2**40, 2**40]).dequantized(), torch.full((2, 4), 3.0))


@pytest.mark.parametrize("named", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("zero", [7, 8])
def test_zeros_of_symmetric_weights_show_the_version(named, zero):
    """Of 40 rows, whose last group is shorter."""
    weight = torch.empty(16, 40)
    stored = symmetric_gptq(weight, zero)
    read = quantization_of({"quantization_config": SYMMETRIC | {"checkpoint_format": named}})
    assert read is not None
    assert torch.equal(read.weight(stored.get).dequantized(), weight)


def test_one_scale_for_all_and_zeros_of_groups():
    numbers = torch.arange(-8, 8).repeat(2, 1)
    stored = {"weight_packed": pack(numbers + 8, 4), "weight_scale": torch.tensor([0.5])}
    assert torch.equal(packed(stored.get, 4).dequantized(), numbers * 0.5)
    stored = {
        "weight": numbers.to(torch.int8),
        "weight_scale": torch.tensor([[0.5, 2.0], [1.0, 4.0]]),
        "weight_zero_point": torch.tensor([[1, -2], [3, -4]], dtype=torch.int8),
    }
    zeros, scales = (stored[f"weight_{name}"].repeat_interleave(8, 1) for name in ("zero_point", "scale"))
    assert torch.equal(scaled(stored.get).dequantized(), (numbers - zeros) * scales)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, r"'gptq' \{'bits': 3\}"),
        ({"quant_method": "awq", "version": "gemv"}, r"'awq' \{'version': 'gemv'\}"),
        ({"quant_method": TENSORS, "format": "nvfp4-pack-quantized", "config_groups": group_of(4)}, "nvfp4-pack"),
    ],
)
def test_other_quantizations_are_named(settings, found):
    with pytest.raises(QuantizationError, match=rf"unsupported quantization .*{found}.*: expected .*pack-quantized"):
        quantization_of({"quantization_config": settings})


def test_layers_of_other_bits_are_refused():
    rules = {"-:.*down_proj": {}, ".*up_proj": {"bits": 8, "group_size": 32}}
    assert quantization_of({"quantization_config": SYMMETRIC | {"dynamic": rules, "bits": 8}}) is not None
    with pytest.raises(QuantizationError, match="`dynamic` has layers of 8 bits, expected 4 in all"):
        quantization_of({"quantization_config": SYMMETRIC | {"dynamic": rules}})


def codes(bits: int, groups: list[int], count: int) -> QuantizedWeight:
    """Three rows of random codes whose features are in these groups."""
    numbers = torch.randint(0, 2**bits, (3, len(groups)), dtype=torch.uint8)
    scale, zero = torch.rand(3, count), torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    return QuantizedWeight(numbers, scale, zero, torch.tensor(groups), bits)


@pytest.mark.parametrize(
    ("bits", "groups", "count", "form"),
    [
        (4, [0] * 32 + [1] * 32 + [2] * 7, 3, "i4g32"),
        (2, [0] * 64 + [1] * 64, 2, "i4g64"),
        (8, [0] * 40, 1, "i8g64"),
        (4, [1, 0] * 32, 2, "i4g32"),
        (4, [2] * 8 + [0, 1] * 32, 3, "i4g32"),
        (4, [0] * 16 + [1] * 16, 2, None),
        (4, [0] * 32 + [1] * 40, 2, None),
        (4, [0] * 32 + [2] * 32, 3, None),
        (4, [1] * 32, 2, None),
        (4, [0] * 32 + [1] * 32, 3, None),
    ],
)
def test_groups_of_a_multiple_of_32_are_blocks(bits, groups, count, form):
    """One group of any size is one block. The last group may be cut."""
    weight = codes(bits, groups, count)
    assert (weight.form and weight.form.name) == form
    if form:
        rows = torch.tensor([2, 0])
        blocks = weight.blocks(rows)
        assert (blocks.feature_order is None) == (groups == sorted(groups))
        assert torch.equal(torch.from_numpy(blocks.dequantized()), weight.dequantized()[rows])


def test_floats_of_eight_bits_are_no_blocks():
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    assert scaled({"weight": weight, "weight_scale": torch.ones(2, 1)}.get).form is None


@pytest.mark.parametrize("group", [[0, 1, 2], [-1, 0, 1], [0, 1]])
def test_groups_that_are_not_there_are_refused(group):
    with pytest.raises(ValueError, match="3 columns are not in 2 groups"):
        QuantizedWeight(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 2), torch.ones(2, 2), torch.tensor(group))
