"""Weights in the blocks of their source: the same numbers in the same order as the floats that are read of it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from redraft.compiler.draft_model import is_model
from redraft.model_defs.target.families.base import Weight
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.blocks import StoredBlocks, row_orders
from redraft.model_defs.weights.folder import GGUF, model_digest
from redraft.plugins.operators.linear.blocks import GGUF_FORMS
from tests.engines.tiny import tiny_lm, write_model
from tests.model_defs.weights.folders import EXPERT_TYPES, EXPERTS, MIXED, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def whole(blocks: StoredBlocks, name: str) -> np.ndarray:
    """All numbers of a weight, of which a few rows at a time are read."""
    matrices = [
        [part.rows(slice(i, i + 100)).dequantized() for part in matrix for i in range(0, part.shape[0], 100)]
        for matrix in blocks.matrices(name)
    ]
    return np.stack([np.concatenate(parts) for parts in matrices]).squeeze()


@pytest.mark.parametrize("kind", [kind.upper() for kind in GGUF_FORMS])
def test_blocks_of_each_type_are_the_numbers_of_the_package(kind, tmp_path):
    folder = write_folder(tmp_path, {"attn_output": kind, "output": kind})
    blocks = Target.from_folder(folder, in_blocks=True).blocks
    tensors = {one.name: one for one in gguf.GGUFReader(folder / GGUF).tensors}
    for ours, theirs in (("layers.1.attention_out", "blk.1.attn_output"), ("lm_head", "output")):
        tensor = tensors[f"{theirs}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        ((segment,),) = blocks.matrices(f"{ours}.weight")
        assert segment.form.name == GGUF_FORMS[kind.lower()]
        np.testing.assert_array_equal(segment.rows(slice(None)).dequantized(), expected)
    assert "layers.1.qkv.weight" not in blocks


def test_every_weight_is_what_floats_are_read_as(folder):
    exact, blocks = Target.from_folder(folder), Target.from_folder(folder, in_blocks=True).blocks
    matrices = {name: weight for name, weight in exact.named_parameters() if weight.ndim == 2}
    assert len(matrices) == 10
    for name, weight in matrices.items():
        np.testing.assert_array_equal(whole(blocks, name), weight.numpy(), err_msg=name)
        np.testing.assert_array_equal(blocks.first_rows(name, 270).numpy(), weight[:270].numpy())
    assert forms(blocks, "layers.0.qkv.weight") == [[("q4_k", 256 + 32), ("q6_k", 32)]]
    assert not blocks.widened


def test_types_that_are_read_into_one_form_are_joined(tmp_path):
    folder = write_folder(tmp_path, MIXED | {"attn_q": "Q6_K", "attn_k": "Q3_K"})
    exact, blocks = Target.from_folder(folder), Target.from_folder(folder, in_blocks=True).blocks
    name = "layers.1.qkv.weight"
    np.testing.assert_array_equal(whole(blocks, name), exact.get_parameter(name).numpy())
    assert forms(blocks, name) == [[("q6_k", 256 + 32 + 32)]]


def forms(blocks: StoredBlocks, name: str) -> list[list[tuple[str, int]]]:
    return [[(part.form.name, part.shape[0]) for part in matrix] for matrix in blocks.matrices(name)]


def test_experts_are_a_stack_of_matrices(tmp_path):
    folder = write_folder(tmp_path, EXPERT_TYPES, **EXPERTS)
    exact, blocks = Target.from_folder(folder), Target.from_folder(folder, in_blocks=True).blocks
    for name, weight in exact.named_parameters():
        if name in blocks:
            np.testing.assert_array_equal(whole(blocks, name), weight.numpy(), err_msg=name)
            np.testing.assert_array_equal(blocks.first_rows(name, 3).numpy(), weight[:3].numpy())
    assert forms(blocks, "layers.1.experts.gate_up") == [[("q4_k", 288), ("q6_k", 288)]] * 5
    assert forms(blocks, "layers.1.experts.down") == [[("q5_0", 256)]] * 5
    assert not blocks.widened
    stand_ins = Target.from_folder(folder, in_blocks=True, float_ends=False)
    assert stand_ins.layers[0].experts.down.untyped_storage().nbytes() == 4
    assert target_fingerprint(stand_ins) == target_fingerprint(exact)


def test_rows_in_adjacent_pairs(tmp_path):
    """Llama's files have query and key heads so."""
    folder = write_folder(tmp_path, model_type="llama")
    exact, blocks = Target.from_folder(folder), Target.from_folder(folder, in_blocks=True).blocks
    for layer in range(2):
        name = f"layers.{layer}.qkv.weight"
        np.testing.assert_array_equal(whole(blocks, name), exact.get_parameter(name).numpy())


def test_what_is_not_loaded_has_no_storage_and_a_number_of_its_own(folder):
    """The exporter takes equal constants for one."""
    target, exact = Target.from_folder(folder, in_blocks=True, float_ends=False), Target.from_folder(folder)
    stand_ins = [weight for weight in target.parameters() if weight.ndim == 2]
    assert all(weight.untyped_storage().nbytes() == 4 for weight in stand_ins)
    assert len({float(weight[0, 0]) for weight in stand_ins}) == len(stand_ins) == 10
    for name, weight in exact.named_parameters():
        assert weight.ndim == 2 or torch.equal(target.get_parameter(name), weight)
    shared = Target.from_folder(folder, in_blocks=True)
    assert torch.equal(shared.embedding.weight, exact.embedding.weight)
    assert torch.equal(shared.lm_head.weight, exact.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_has_one_fingerprint_in_every_form(tmp_path, tied):
    folder = write_folder(tmp_path, tie_word_embeddings=tied)
    in_blocks = Target.from_folder(folder, in_blocks=True, float_ends=False)
    assert target_fingerprint(in_blocks) == target_fingerprint(Target.from_folder(folder))
    assert target_fingerprint(in_blocks) == target_fingerprint(Target.from_folder(folder, None))
    assert "lm_head.weight" in in_blocks.blocks


def test_types_that_no_operator_reads_are_floats_and_named(tmp_path):
    """MXFP4 has blocks of 32 too. Its neighbours in a joined weight are floats as well."""
    kinds = MIXED | {"attn_output": "MXFP4", "attn_v": "F16", "ffn_up": "BF16"}
    folder = write_folder(tmp_path, kinds)
    target, exact = Target.from_folder(folder, in_blocks=True), Target.from_folder(folder)
    for layer in range(2):
        for name in ("attention_out", "qkv", "gate_up"):
            name = f"layers.{layer}.{name}.weight"
            assert name not in target.blocks
            assert torch.equal(target.get_parameter(name), exact.get_parameter(name))
    layer = "model.layers.0"
    assert target.blocks.widened[f"{layer}.self_attn.o_proj.weight"] == "MXFP4"
    assert target.blocks.widened[f"{layer}.self_attn.q_proj.weight"] == "Q4_K"
    assert f"{layer}.self_attn.v_proj.weight" not in target.blocks.widened


@pytest.mark.parametrize("write", [lambda path: write_model(tiny_lm(), path), lambda path: write_folder(path, {})])
def test_a_folder_of_floats_has_no_blocks(tmp_path, write):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"holds no blocks .*: fetch the model again .* --replace"):
        Target.from_folder(tmp_path, in_blocks=True)


def test_a_folder_with_a_gguf_file_is_a_model_and_teacher(tmp_path):
    """For a draft LM, and for the records of teacher data."""
    folder, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", {})
    assert is_model(folder)
    assert model_digest(folder) != model_digest(other)


def test_damaged_scales_are_named(folder, tmp_path):
    data = bytearray((folder / GGUF).read_bytes())
    tensor = next(one for one in gguf.GGUFReader(folder / GGUF).tensors if one.name == "blk.1.ffn_down.weight")
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
    (tmp_path / GGUF).write_bytes(data)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    blocks = Target.from_folder(tmp_path, in_blocks=True).blocks
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        whole(blocks, "layers.1.down.weight")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        Target.from_folder(tmp_path)


def test_scaled_weights_stay_floats(tmp_path):
    """Granite's multipliers are parts of its weights."""
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.2}
    folder = write_folder(tmp_path, model_type="granite", logits_scaling=8.0, **multipliers)
    target, exact = Target.from_folder(folder, in_blocks=True), Target.from_folder(folder)
    assert "layers.0.gate_up.weight" in target.blocks
    for name in ("lm_head", "layers.0.qkv", "layers.0.attention_out", "layers.1.down"):
        assert f"{name}.weight" not in target.blocks
        assert torch.equal(target.get_parameter(f"{name}.weight"), exact.get_parameter(f"{name}.weight"))


@pytest.mark.parametrize(
    ("change", "orders"),
    [
        (None, [{0: [0, 1, 2], 1: [0, 1]}]),
        (lambda weight: weight[2:], [{0: [2], 1: [0, 1]}]),
        (lambda weight: weight[[1, 0, 2, 4, 3]], [{0: [1, 0, 2], 1: [1, 0]}]),
        (lambda weight: weight.flip(0), None),
        (lambda weight: weight * 2.0, None),
        (lambda weight: weight[:4].unflatten(0, (2, 2)), [{0: [0, 1]}, {0: [2], 1: [0]}]),
        (lambda weight: weight[:4].unflatten(0, (2, 1, 2)), None),
    ],
)
def test_changes_beyond_the_order_of_rows_are_seen(change, orders):
    found = row_orders(Weight(("a", "b"), change), [3, 2])
    assert orders == (found and [{source: rows.tolist() for source, rows in matrix} for matrix in found])
