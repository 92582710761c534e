"""What q/k norms cost: the second model is the first with norms, and the engines are compared step by step."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.verify import qk_norm
from model_defs.target.attention import causal_attend
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from redraft.bundle.config import LimitsInfo
from tests.engines.tiny import tiny_bundle, tiny_lm, tiny_target, write_model

LIMITS = LimitsInfo(slots=3, max_len=60, max_tree=8, prefill_chunk=16)


def test_the_second_model_has_norms_and_nothing_else(tmp_path):
    plain = tiny_lm()
    write_model(plain, tmp_path / "plain")
    qk_norm.write_with_norms(tmp_path / "plain", tmp_path / "normed")
    config = TargetConfig.load(tmp_path / "normed")
    assert config == replace(TargetConfig.load(tmp_path / "plain"), qk_norm=True, family="qwen3")
    normed, expected = Target.from_folder(tmp_path / "normed"), Target(replace(plain.config, qk_norm=True)).eval()
    expected.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.tensor([[5, 110, 0, 7]])
    with torch.no_grad():
        logits = [model(tokens, causal_attend(model.config, 4)).hidden for model in (normed, expected)]
    torch.testing.assert_close(*logits)
    assert (tmp_path / "normed/tokenizer.json").is_file()


def test_other_families_are_refused(tmp_path):
    write_model(tiny_target(), tmp_path / "qwen2")
    with pytest.raises(ValueError, match="is a 'qwen2': expected a llama, which has no such norms"):
        qk_norm.write_with_norms(tmp_path / "qwen2", tmp_path / "normed")


def test_steps_are_paired_and_a_slower_engine_shows(tmp_path, monkeypatch):
    bundle = tiny_bundle(tmp_path, tiny_target(), limits=LIMITS)
    load, pauses = qk_norm.load_engine, iter((0.001, 0.01, 0.01, 0.001))

    def slowed(*given):
        engine, pause = load(*given), next(pauses)

        def execute(*batch):
            time.sleep(pause)
            return engine.execute(*batch)

        return SimpleNamespace(execute=execute, close=engine.close)

    monkeypatch.setattr(qk_norm, "load_engine", slowed)
    results = qk_norm.paired([bundle.path, bundle.path], (1, 7), 20, rounds=9, threads=1)
    assert [row["rows"] for row in results] == [1, 7]
    assert next(pauses, None) is None, "each engine is loaded first once"
    for row in results:
        assert row["ms"][1] > row["ms"][0] > 1
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["ratio"] > 1.2
    assert len(qk_norm.table(results).rows) == 2
