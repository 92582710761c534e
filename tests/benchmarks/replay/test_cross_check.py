"""Replay and live decoding give the same, step for step, in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.replay import cross_check
from benchmarks.replay.answers import Answer, write
from benchmarks.speed.inprocess import teacher_force
from redraft.bundle.manifest import Bundle
from redraft.engines import load_engine
from redraft.llm import LLM
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.runtime import Runtime, bundle_plans
from redraft.scheduling.scheduler import Limits
from tests.engines.tiny import VOCAB, bundle_of_methods, tiny_drafter_of, tiny_target, write_model
from tests.toy_engine import toy_codec

BROAD = {"ngram": False, "candidates": 30, "tree_budget": 31}
"""Random drafters seldom guess a token with few tries."""
SHAPES = {
    "chain": ("hidden_state", {"construction": "best_first", "beam_width": 2, "beam_length": 3}),
    "beams": ("recurrent", {"construction": "beam", "beam_width": 15, "beam_length": 2}),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    folder, target = tmp_path_factory.mktemp("check"), tiny_target()
    plans = {name: (tiny_drafter_of(target, kind), BROAD | plan) for name, (kind, plan) in SHAPES.items()}
    write_model(target, folder / "target")
    return bundle_of_methods(folder, target, plans)


@pytest.fixture(scope="module")
def llm(bundle) -> LLM:
    limits = Limits(**bundle.config.limits.model_dump())
    plans = bundle_plans(bundle.config, bundle.path)
    return LLM(Runtime(load_engine(bundle), toy_codec(), limits, VOCAB, frozenset(), plans, prefix_reuse=False))


@pytest.fixture(scope="module")
def answers(llm) -> list[Answer]:
    """Greedy answers; the hidden states are the engine's."""
    found, rng = [], np.random.default_rng(2)
    for length, count in ((7, 30), (12, 18), (3, 25)):
        prompt = rng.integers(VOCAB, size=length).tolist()
        asked = GenerateRequest(id="r", input_ids=prompt, max_tokens=count, end_id=-1, method=AUTO_REGRESSIVE)
        tokens = [*prompt, *llm.run([asked])[0].token_ids]
        hidden = np.concatenate([states for _, states in teacher_force(llm, tokens, 0) if states is not None])
        found.append(Answer(torch.tensor(tokens), torch.from_numpy(hidden), length))
    return found


def test_a_replay_takes_the_steps_of_live_decoding(bundle, llm, answers, tmp_path, monkeypatch, capsys):
    """Off by one in roots or hidden states, another shape or budget: the counts differ."""
    folder = bundle.path.parent
    write(tmp_path, answers)
    methods, report = tmp_path / "m.toml", tmp_path / "report.json"
    methods.write_text("".join(f"[{name}]\ndrafter = '{folder / name}'\n" for name in SHAPES))
    monkeypatch.setattr(cross_check, "load_llm", lambda *_: llm)
    options = {"model": folder / "target", "bundle": bundle.path, "methods": methods, "answers": tmp_path}
    flags = [str(part) for name, path in (options | {"output": report}).items() for part in (f"--{name}", path)]
    cross_check.main(flags)
    for ways in json.loads(report.read_text())["methods"].values():
        rows = [way.pop("rows_per_step") for way in ways.values()]
        assert ways["replayed"] == ways["decoded"]
        assert rows[0] == pytest.approx(rows[1], rel=0.01), "answers are stored in bf16"
        assert ways["decoded"]["acceptance_length"] > 1
        assert rows[1] > 4
    assert "chain" in capsys.readouterr().out
