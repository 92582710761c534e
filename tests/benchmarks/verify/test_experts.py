"""What experts cost: the second model is the first with parts of its MLPs as experts."""

from __future__ import annotations

import torch

from benchmarks.verify.experts import CHOSEN, EXPERTS, write_with_experts
from model_defs.files import read_tensors
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from tests.engines.tiny import tiny_lm, write_model


def test_the_second_model_has_as_many_columns_for_a_row(tmp_path):
    write_model(tiny_lm(), tmp_path / "dense")
    write_with_experts(tmp_path / "dense", tmp_path / "experts")
    config = TargetConfig.load(tmp_path / "experts")
    assert config.experts is not None
    assert (config.experts.count, config.experts.chosen, config.experts.normalized) == (EXPERTS, CHOSEN, True)
    assert config.intermediate_size * CHOSEN == tiny_lm().config.intermediate_size
    layer = Target.from_folder(tmp_path / "experts").layers[1].experts
    up = read_tensors(tmp_path / "dense" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    own = layer.gate_up[7, config.intermediate_size :]
    assert all((up == row).all(dim=1).any() for row in own), "rows of the dense model's MLP"
    assert torch.unique(layer.gate_up, dim=0).shape[0] == EXPERTS
