"""Quantized sources: weights packed as each format does it are read exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from redraft.model_defs.files import SINGLE
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import GGUF, count_numbers
from tests.compiler.checkpoints.test_odd_weights import shard
from tests.compiler.checkpoints.tiny_llama import assert_complete, fetch, pickle
from tests.model_defs.weights.layouts import (
    TENSORS,
    Write,
    awq,
    compressed,
    gptq,
    group_of,
    older_compressed,
    scaled,
    scaled_as_a_whole,
    symmetric_gptq,
)
from tests.model_defs.weights.layouts import quantize as quantize_folder

GROUP = 16
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


IN_GROUPS = {
    "AWQ, 4 bits, groups of 32": ({"quant_method": "awq", "bits": 4}, lambda w: awq(w, 32)),
    "GPTQ, 4 bits, act-order": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, 4, 1, 32)),
    "GPTQ, 8 bits, groups of 32": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8, 1, 32)),
    "compressed-tensors, 4 bits, groups of 32": (
        {"quant_method": TENSORS, "format": "pack-quantized", "config_groups": group_of(4)},
        lambda w: compressed(w, 4, symmetric=True, size=32),
    ),
}
FORMS |= IN_GROUPS
KEPT = (
    *("compressed-tensors, int8", "compressed-tensors, float8", "compressed-tensors, float8, one scale", "fp8"),
    *IN_GROUPS,
)


def write(checkpoint: Path, source: Path, settings: dict, quantize: Write) -> dict[str, Tensor]:
    """A copy of a checkpoint with quantized layers. Returns the weights that it stands for."""
    shutil.copytree(checkpoint, source)
    return quantize_folder(source, settings, quantize)


@pytest.mark.parametrize("title", FORMS)
def test_quantized_layers_are_read_exactly(checkpoint, tmp_path, title, capsys):
    """As bfloat16, in which a fetched model is stored whose groups no operator takes, or as they are."""
    source = tmp_path / "source"
    plain = write(checkpoint, source, *FORMS[title])
    folder = fetch(source, tmp_path)
    assert json.loads((folder / "source.json").read_text())["precision"] == ", ".join(title.split(", ")[:2])
    exact = Target.from_folder(source)
    assert torch.equal(exact.layers[1].down.weight, plain["model.layers.1.mlp.down_proj.weight"])
    if title in KEPT:
        assert (folder / SINGLE).samefile(source / SINGLE)
        for name, weight in Target.from_folder(folder).state_dict().items():
            assert torch.equal(weight, exact.get_parameter(name)), name
        return
    assert_complete(folder, "source")
    assert "of a multiple of 32 as they are, and model.layers." in capsys.readouterr().out
    fetched = load_file(folder / SINGLE)
    assert set(fetched) == set(plain)
    for name, weight in plain.items():
        assert torch.equal(fetched[name], weight.bfloat16()), name


@pytest.mark.parametrize("title", KEPT)
def test_a_checkpoint_whose_groups_operators_take_is_kept(checkpoint, tmp_path, title, capsys):
    """Under other names than a single file's too, and when it is fetched from a fetched folder."""
    source = tmp_path / "source"
    plain = write(checkpoint, source, *FORMS[title])
    (source / SINGLE).rename(source / "gptq_model-4bit.safetensors")
    first = fetch(source, tmp_path / "first")
    second = fetch(first, tmp_path / "second")
    assert f"{', '.join(title.split(', ')[:2])}, " in capsys.readouterr().out
    for folder in (first, second):
        assert_complete(folder, "source", "gptq_model-4bit.safetensors")
        assert (folder / "gptq_model-4bit.safetensors").samefile(source / "gptq_model-4bit.safetensors")
        assert count_numbers(folder) == sum(weight.numel() for weight in plain.values())
        target = Target.from_folder(folder)
        assert torch.equal(target.layers[1].down.weight, plain["model.layers.1.mlp.down_proj.weight"])


def test_shards_are_kept(checkpoint, tmp_path):
    source = tmp_path / "source"
    plain = write(checkpoint, source, *FORMS[KEPT[0]])
    shard(source)
    folder = fetch(source, tmp_path)
    assert {file.name for file in folder.glob("*.safetensors*")} == {"a.safetensors", "b.safetensors"}
    assert torch.equal(Target.from_folder(folder).layers[1].down.weight, plain["model.layers.1.mlp.down_proj.weight"])


def test_weights_in_torch_format_are_written_as_floats(checkpoint, tmp_path):
    source = tmp_path / "source"
    plain = write(checkpoint, source, *FORMS[KEPT[0]])
    pickle(source)
    folder = fetch(source, tmp_path)
    assert_complete(folder, "source")
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(load_file(folder / SINGLE)[name], plain[name].bfloat16())


def test_a_kept_checkpoint_that_is_damaged_is_named_when_it_is_read(checkpoint, tmp_path):
    source = tmp_path / "source"
    write(checkpoint, source, SYMMETRIC | {"group_size": 32}, lambda w: symmetric_gptq(w, 9, 32))
    folder = fetch(source, tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.0\..*qzeros has 9 to 9, .* sym true: expected only 7 or 8"):
        Target.from_folder(folder)


def test_a_gguf_file_beside_other_weights_is_said(checkpoint, gguf_file, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    shutil.copy(gguf_file, source / "other.gguf")
    folder = fetch(source, tmp_path)
    assert "other.gguf is not read: give the file itself" in capsys.readouterr().out
    shutil.copy(gguf_file, folder / GGUF)
    for read in (lambda: fetch(folder, tmp_path, name="again"), lambda: Target.from_folder(folder)):
        with pytest.raises(ValueError, match=r"holds the model twice, in model\.gguf and in model\.safetensors"):
            read()


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
    with pytest.raises(ValueError, match=rf"source: model\.layers\.0\.\w+\.\w+\.{found}"):
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
    with pytest.raises(ValueError, match=r"model\.layers\.0\.\w+\.\w+ is not quantized as its tensors and"):
        fetch(tmp_path / "source", tmp_path)
