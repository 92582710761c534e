from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.speed.sampled_head import compare
from model_defs.drafters.eagle import EagleDrafter
from model_defs.drafters.hidden_state import HiddenStateDrafter
from tests.engines.tiny import VOCAB, tiny_target
from training import distillation as training


@pytest.mark.parametrize("kind", [EagleDrafter, HiddenStateDrafter])
def test_a_sampled_head_turns_the_gradient_little(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    target, length = tiny_target(), 1200
    shard = {
        "tokens": torch.randint(VOCAB, (length,), dtype=torch.int32),
        "hidden": torch.randn(length, target.config.hidden_size).to(torch.bfloat16),
        "offsets": torch.tensor([0, length]),
        "answer_starts": torch.tensor([2]),
    }
    save_file(shard, tmp_path / "shard-00000.safetensors")
    settings = {"info_vocabulary": "60", "info_rank": "8"} if kind is HiddenStateDrafter else {}
    kind(kind.configure(target, VOCAB, settings), target, torch.arange(VOCAB)).save(tmp_path, {})
    for name, value in {"OTHER_ROWS": 40, "SHAPE": 4, "SOFT_LABELS": 4, "LOGIT_ROWS": {"cpu": 8}}.items():
        monkeypatch.setattr(training, name, value)
    name, whole, sampled, _, cosine = compare(tmp_path, target, [tmp_path], batches=1)
    assert name == kind.name
    assert float(whole) > 0 < float(sampled)
    assert 0.9 < float(cosine) < 1
