"""Drafters judged on held-out conversations, as training judges them."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from safetensors.torch import save_file

from benchmarks.training import held_out
from model_defs.drafters.registry import DRAFTERS
from tests.engines.tiny import VOCAB, tiny_target, write_model
from training.distillation import Labels, Trainer
from training.teacher_data import TeacherData


@pytest.mark.parametrize("kind", ["recurrent", "eagle"])
def test_the_row_is_what_training_would_log(tmp_path, kind, capsys):
    torch.manual_seed(0)
    target, data, length = tiny_target(), tmp_path / "data", 400
    data.mkdir()
    for shard in range(2):
        tensors = {
            "tokens": torch.randint(VOCAB, (length,), dtype=torch.int32),
            "hidden": torch.randn(length, target.config.hidden_size).to(torch.bfloat16),
            "offsets": torch.tensor([0, length]),
            "answer_starts": torch.tensor([2]),
        }
        save_file(tensors, data / f"shard-0000{shard}.safetensors")
    write_model(target, tmp_path / "model")
    drafter = DRAFTERS[kind](DRAFTERS[kind].configure(target, VOCAB), target, torch.arange(VOCAB))
    drafter.save(tmp_path / "drafter", {})
    output = tmp_path / "judged.json"
    held_out.main([tmp_path / "drafter"], tmp_path / "model", [data], held_out=1, unroll=3, output=output)
    printed = capsys.readouterr().out
    teacher = TeacherData([data], 1, drafter.reads_context)
    found = Trainer(target, drafter.eval(), Labels.soft, 3, 0.0).evaluate(teacher.held_out(drafter.recipe.window, 3))
    assert f"{found['chain_acceptance_length']:.2f}" in printed
    assert kind in printed
    (row,) = json.loads(output.read_text())
    assert (row["drafter"], row["folder"]) == (kind, str(tmp_path / "drafter"))
    assert {name: row[name] for name in found} == found
    held_out.main([tmp_path / "drafter"], tmp_path / "model", [data], held_out=2)
    with pytest.raises(typer.BadParameter, match="no shard"):
        held_out.main([tmp_path / "drafter"], tmp_path / "model", [tmp_path])
