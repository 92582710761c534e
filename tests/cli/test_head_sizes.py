"""Head sizes that the CPU operators take, and refusals of the others before anything is exported."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from redraft.cli import build
from redraft.engines import load_engine
from tests.cli.commands import invoke
from tests.engines.tiny import chain, expected, make_batch, random_model, tiny_bundle, tiny_lm, tiny_target, write_model

run = partial(invoke, build.main)


@pytest.mark.parametrize("size", [16, 80])
def test_others_are_refused_before_the_weights_are_read(tmp_path, monkeypatch, size):
    write_model(random_model(dataclasses.replace(tiny_target().config, head_size=size)), tmp_path / "model")
    monkeypatch.setattr("redraft.model_defs.target.model.Target.from_folder", lambda *_: pytest.fail("read"))
    done = run("--model", tmp_path / "model", "--output", tmp_path / "b", "--no-drafter", "--max-len", 64)
    assert done.exit_code == 1
    assert f"the target has heads of size {size}, openvino takes multiples of 32 (32, 64, 96" in done.output
    assert not (tmp_path / "b").exists()


def test_a_draft_lm_with_others_is_refused(model, tmp_path):
    write_model(random_model(dataclasses.replace(tiny_lm().config, head_size=16)), tmp_path / "lm")
    done = run("--model", model, "--output", tmp_path / "b", "--drafter", tmp_path / "lm", "--max-len", 64)
    assert done.exit_code == 1
    assert "draft_lm has heads of size 16, openvino takes multiples of 32" in done.output
    assert not (tmp_path / "b").exists()


def test_any_multiple_of_32_computes(tmp_path):
    target = random_model(dataclasses.replace(tiny_target().config, head_size=96))
    engine = load_engine(tiny_bundle(tmp_path, target, drafts=False))
    sequences = [chain(0, [], [3, 4, 5, 6, 7])]
    logits, _ = engine.execute(make_batch(sequences))
    np.testing.assert_allclose(np.asarray(logits), expected(target, sequences)[0], atol=1e-3)
