"""Quantized sources: weights packed as each format does it are read exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.compiler.checkpoints.quantized import AWQ_ORDER, packed, quantization_of
from redraft.compiler.checkpoints.quantized import scaled as read_scaled
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.files import SINGLE
from redraft.model_defs.target.model import Target
from tests.compiler.checkpoints.tiny_llama import fetch

GROUP = 16


def pack(values: Tensor, bits: int) -> Tensor:
    """int64 [..., n] of non-negative numbers to int32 words, the lowest bits first."""
    count = 32 // bits
    shifts = torch.arange(count) * bits
    return (values.unflatten(-1, (-1, count)) << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def groups(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers int64 [out, in], zeros [out, groups] and scales fp16 [out, groups] of a weight's shape, with the
    weight that they stand for in place of it."""
    out, columns = weight.shape
    values, zeros = torch.randint(0, 2**bits, (out, columns)), torch.randint(0, 2**bits, (out, columns // GROUP))
    scales = (torch.rand(out, columns // GROUP) + 0.5).half() / 2**bits
    spread = [x.repeat_interleave(GROUP, 1) for x in (zeros, scales)]
    weight.copy_((values - spread[0]).float() * spread[1].float())
    return values, zeros, scales


def awq(weight: Tensor) -> dict[str, Tensor]:
    values, zeros, scales = groups(weight, 4)
    order = list(AWQ_ORDER)
    q, z = (pack(x.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4) for x in (values, zeros))
    return {"qweight": q, "qzeros": z, "scales": scales.T}


def gptq(weight: Tensor, bits: int, bias: int) -> dict[str, Tensor]:
    """With rows of a group that do not lie together (act-order), and zeros of 0. GPTQModel subtracts the bias of all
    zeros from each word at once."""
    values, zeros, scales = groups(weight, bits)
    order = torch.randperm(weight.shape[1])
    weight.copy_(weight[:, order])
    ones = sum(bias << shift for shift in range(0, 32, bits))
    return {
        "qweight": pack(values[:, order], bits).T,
        "qzeros": pack(zeros.T, bits) - ones,
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP)[order].int(),
    }


def symmetric_gptq(weight: Tensor, zero: int) -> dict[str, Tensor]:
    """Of 4 bits, with the middle as zeros, stored as `zero`, and group 0 for all rows, which are in order."""
    out, columns = weight.shape
    values, count = torch.randint(0, 16, (out, columns)), -(-columns // GROUP)
    scales = (torch.rand(out, count) + 0.5).half() / 16
    weight.copy_((values - 8).float() * scales.float().repeat_interleave(GROUP, 1)[:, :columns])
    return {
        "qweight": pack(values, 4).T,
        "qzeros": pack(torch.full((count, out), zero), 4),
        "scales": scales.T,
        "g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def compressed(weight: Tensor, bits: int, symmetric: bool) -> dict[str, Tensor]:
    values, zeros, scales = groups(weight, bits)
    stored = {"weight_packed": pack(values, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if symmetric:
        weight.copy_((values - 2 ** (bits - 1)).float() * scales.repeat_interleave(GROUP, 1).float())
        return stored
    return stored | {"weight_zero_point": pack(zeros.T, bits).T}


def older_compressed(weight: Tensor) -> dict[str, Tensor]:
    """As files from before April 2025 have it: zeros as they are, and order of columns that says there is none."""
    values, zeros, scales = groups(weight, 4)
    return {
        "weight_packed": pack(values, 4),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
        "weight_g_idx": torch.full(weight.shape[1:], -1, dtype=torch.int32),
    }


def scaled(weight: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """A scale for each row, or for each block, of which the last ones are cut."""
    stored = (weight.clamp(-2, 2) * (10 if dtype == torch.int8 else 1)).to(dtype)
    rows, columns = block or (1, weight.shape[1])
    scale = (torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) + 0.5).bfloat16()
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    weight.copy_(stored.float() * spread.float())
    return {"weight": stored, "weight_scale_inv" if block else "weight_scale": scale}


def scaled_as_a_whole(weight: Tensor) -> dict[str, Tensor]:
    """One scale for all of a weight."""
    stored = weight.clamp(-2, 2).to(torch.float8_e4m3fn)
    weight.copy_(stored.float() * 0.75)
    return {"weight": stored, "weight_scale": torch.tensor([0.75])}


def group_of(bits: int, kind: str = "int", **more: bool) -> dict:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **more}}}


TENSORS = "compressed-tensors"
SYMMETRIC = {"quant_method": "gptq", "bits": 4, "sym": True, "group_size": GROUP}
ASYMMETRIC = {
    "quant_method": TENSORS,
    "format": "pack-quantized",
    "config_groups": group_of(8, symmetric=False),
}
FORMS = {
    "AWQ, 4 bits": ({"quant_method": "awq", "bits": 4, "version": None}, awq),
    "GPTQ, 4 bits": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, 4, 1)),
    "GPTQ, 8 bits, first version": ({"quant_method": "gptq", "bits": 8, "sym": False}, lambda w: gptq(w, 8, 1)),
    "GPTQ, 4 bits, second version": (
        {"quant_method": "gptq", "bits": 4, "sym": False, "format": "GPTQ_V2"},
        lambda w: gptq(w, 4, 0),
    ),
    "GPTQ, 8 bits": ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 8, 0)),
    "GPTQ, 2 bits": ({"quant_method": "gptq", "bits": 2}, lambda w: gptq(w, 2, 1)),
    "GPTQ, 4 bits, symmetric": (SYMMETRIC | {"checkpoint_format": "gptq"}, lambda w: symmetric_gptq(w, 8)),
    "compressed-tensors, 4 bits": (
        {"quant_method": TENSORS, "format": "pack-quantized", "config_groups": group_of(4)},
        lambda w: compressed(w, 4, symmetric=True),
    ),
    "compressed-tensors, 8 bits": (
        ASYMMETRIC,
        lambda w: compressed(w, 8, symmetric=False),
    ),
    "compressed-tensors, 4 bits, older": (
        {"quant_method": TENSORS, "format": "pack-quantized", "config_groups": group_of(4)},
        older_compressed,
    ),
    "compressed-tensors, int8": (
        {"quant_method": TENSORS, "format": "int-quantized", "config_groups": group_of(8)},
        lambda w: scaled(w, torch.int8),
    ),
    "compressed-tensors, float8": (
        {"quant_method": TENSORS, "format": "float-quantized", "config_groups": group_of(8, "float")},
        lambda w: scaled(w, torch.float8_e4m3fn),
    ),
    "compressed-tensors, float8, one scale": (
        {"quant_method": TENSORS, "format": "naive-quantized", "config_groups": group_of(8, "float")},
        scaled_as_a_whole,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        lambda w: scaled(w, torch.float8_e4m3fn, (24, 20)),
    ),
}


def write(checkpoint, source, settings: dict, quantize: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """A copy of a checkpoint with quantized layers. Returns the weights that it stands for; embeddings and norms are
    not quantized."""
    shutil.copytree(checkpoint, source)
    torch.manual_seed(0)
    weights, plain = {}, load_file(source / SINGLE)
    for name, weight in plain.items():
        if name.endswith("proj.weight"):
            layer = name.removesuffix(".weight")
            weights |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in quantize(weight).items()}
        else:
            weights[name] = weight
    save_file(weights, source / SINGLE)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize("title", FORMS)
def test_quantized_layers_are_read_exactly(checkpoint, tmp_path, title):
    """As bfloat16, in which a fetched model is stored."""
    source = tmp_path / "source"
    plain = write(checkpoint, source, *FORMS[title])
    folder = fetch(source, tmp_path)
    assert json.loads((folder / "source.json").read_text())["precision"] == ", ".join(title.split(", ")[:2])
    fetched = load_file(folder / SINGLE)
    assert set(fetched) == set(plain)
    for name, weight in plain.items():
        assert torch.equal(fetched[name], weight.bfloat16()), name
    with pytest.raises(ValueError, match=r"pre-quantized weights \(.*redraft fetch dequantizes them"):
        Target.from_folder(source)


@pytest.mark.parametrize(
    ("settings", "quantize", "found"),
    [
        (SYMMETRIC, lambda w: symmetric_gptq(w, 9), "qzeros has 9 to 9, .* sym true: expected only 7 or 8"),
        (SYMMETRIC | {"group_size": 12}, lambda w: symmetric_gptq(w, 7), r"scales has \d groups of \d+ rows, .* 12"),
        (ASYMMETRIC, lambda w: compressed(w, 8, symmetric=True), "weight_zero_point is missing, .* symmetric false"),
        (
            {"quant_method": TENSORS, "format": "int-quantized", "config_groups": group_of(8, symmetric=False)},
            lambda w: scaled(w, torch.int8),
            "weight_zero_point is missing, .* symmetric false",
        ),
    ],
)
def test_a_tensor_that_its_configuration_belies_is_named(checkpoint, tmp_path, settings, quantize, found):
    source = tmp_path / "source"
    write(checkpoint, source, settings, quantize)
    with pytest.raises(FetchError, match=rf"source: model\.layers\.0\.\w+\.\w+\.{found}"):
        fetch(source, tmp_path)


@pytest.mark.parametrize(
    ("settings", "quantize"),
    [
        (SYMMETRIC, lambda w: symmetric_gptq(w, 7) | {"g_idx": torch.full((w.shape[1],), 99)}),
        (SYMMETRIC, lambda w: symmetric_gptq(w, 7) | {"qweight": torch.ones(w.shape[1] // 8, len(w))}),
        (SYMMETRIC, lambda w: symmetric_gptq(w, 7) | {"scales": torch.ones(())}),
        (SYMMETRIC | {"group_size": "x"}, lambda w: {n: t for n, t in symmetric_gptq(w, 7).items() if n != "g_idx"}),
        ({"quant_method": "awq"}, lambda w: awq(w) | {"scales": torch.ones(0, len(w))}),
        ({"quant_method": "fp8", "weight_block_size": [1, 1]}, lambda w: scaled(w, torch.float8_e4m3fn)),
        ({"quant_method": "fp8", "weight_block_size": [-1]}, lambda w: scaled(w, torch.float8_e4m3fn)),
    ],
)
def test_tensors_that_do_not_fit_their_quantization_are_refused(checkpoint, tmp_path, settings, quantize):
    write(checkpoint, tmp_path / "source", settings, quantize)
    with pytest.raises(FetchError, match=r"model\.layers\.0\.\w+\.\w+ is not quantized as its tensors and"):
        fetch(tmp_path / "source", tmp_path)


def test_a_block_may_be_larger_than_a_weight():
    stored = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.full((1, 1), 3.0)}
    assert torch.equal(read_scaled(stored.get, [2**40, 2**40]), torch.full((2, 4), 3.0))


@pytest.mark.parametrize("named", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("zero", [7, 8])
def test_zeros_of_symmetric_weights_show_the_version(named, zero):
    """Of 40 rows, whose last group is shorter."""
    weight = torch.empty(16, 40)
    stored = symmetric_gptq(weight, zero)
    read = quantization_of({"quantization_config": SYMMETRIC | {"checkpoint_format": named}})
    assert read is not None
    assert torch.equal(read.weight(stored.get), weight)


def test_one_scale_for_all_and_zeros_of_groups():
    numbers = torch.arange(-8, 8).repeat(2, 1)
    stored = {"weight_packed": pack(numbers + 8, 4), "weight_scale": torch.tensor([0.5])}
    assert torch.equal(packed(stored.get, 4), numbers * 0.5)
    stored = {
        "weight": numbers.to(torch.int8),
        "weight_scale": torch.tensor([[0.5, 2.0], [1.0, 4.0]]),
        "weight_zero_point": torch.tensor([[1, -2], [3, -4]], dtype=torch.int8),
    }
    zeros, scales = (stored[f"weight_{name}"].repeat_interleave(8, 1) for name in ("zero_point", "scale"))
    assert torch.equal(read_scaled(stored.get), (numbers - zeros) * scales)


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
    with pytest.raises(FetchError, match=rf"unsupported quantization .*{found}.*: expected .*pack-quantized"):
        quantization_of({"quantization_config": settings})


def test_layers_of_other_bits_are_refused():
    rules = {"-:.*down_proj": {}, ".*up_proj": {"bits": 8, "group_size": 32}}
    assert quantization_of({"quantization_config": SYMMETRIC | {"dynamic": rules, "bits": 8}}) is not None
    with pytest.raises(FetchError, match="`dynamic` has layers of 8 bits, expected 4 in all"):
        quantization_of({"quantization_config": SYMMETRIC | {"dynamic": rules}})
