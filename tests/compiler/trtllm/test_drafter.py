"""Drafts from a checkpoint's ranks, computed as TensorRT-LLM computes them, are the drafter's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from redraft.compiler.trtllm.drafter import drafter_weights
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from tests.compiler.trtllm.tiny_trtllm import DRAFTERS, HIDDEN, VOCAB, export, make_apple, make_own, make_target, run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "llama")


def drafts_like_tensorrt_llm(folder: Path, tp: int, model: Path, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """Logits [B, V] after each token of paths int [B, T] from hidden [B, H], as TensorRT-LLM computes them."""
    ranks = [load_file(folder / f"rank{rank}.safetensors") for rank in range(tp)]
    w = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0] if name.startswith("drafter.")}
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"].to(hidden.dtype)
    raw, state, out = json.loads((folder / "config.json").read_text()), torch.zeros_like(hidden), []
    for token in tokens.T:
        recurrent = F.linear(state, w["drafter.rnn_u.weight"], w["drafter.rnn_u.bias"])
        state = F.silu(F.linear(embedding[token], w["drafter.rnn_w.weight"]) + recurrent)
        x = torch.cat([hidden, state], dim=-1)
        if raw["redrafter_exit_dim"] != 2 * raw["redrafter_hidden_size"]:
            x = F.linear(x, w["drafter.input_proj.weight"], w["drafter.input_proj.bias"])
        for i in range(raw["redrafter_num_layers"]):
            x = x + F.silu(F.linear(x, w[f"drafter.layers.{i}.linear.weight"], w[f"drafter.layers.{i}.linear.bias"]))
        out.append(F.linear(x, w["drafter.lm_head.weight"]))
    return out


@pytest.mark.parametrize("tp", [1, 6])
@pytest.mark.parametrize("kind", DRAFTERS)
@torch.no_grad()
def test_checkpoint_drafts_as_the_drafter_does(tmp_path, model, kind, tp):
    folder = DRAFTERS[kind](tmp_path / "drafter", model)
    checkpoint = export(model, folder, tmp_path / "checkpoint", "--tp", tp, "--dtype", "float32")
    drafter = load_drafter(folder, Target.from_folder(model))
    assert isinstance(drafter, RecurrentDrafter)
    hidden, tokens = torch.randn(3, HIDDEN), torch.tensor([[5, 119, 0], [0, 64, 64], [119, 1, 2]])
    found = drafts_like_tensorrt_llm(checkpoint, tp, model, hidden, tokens)
    state = drafter.first_state(tokens[:, 0])
    for depth, logits in enumerate(found):
        if depth:
            state = drafter.next_state(state, tokens[:, depth])
        expected = torch.full((3, VOCAB), -torch.inf)
        expected[:, drafter.hot_ids] = drafter.logits(state, hidden)
        torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()
def test_other_tokens_are_never_drafted_in_any_precision(tmp_path, model, dtype):
    folder = make_own(tmp_path / "drafter", model)
    checkpoint = export(model, folder, tmp_path / "checkpoint", "--dtype", dtype)
    hidden = 30 * torch.randn(3, HIDDEN, dtype=getattr(torch, dtype))
    logits = drafts_like_tensorrt_llm(checkpoint, 1, model, hidden, torch.tensor([[5], [0], [119]]))[0]
    hot = load_file(folder / "drafter.safetensors")["hot_ids"].long()
    probabilities = logits.float().softmax(-1)
    assert probabilities[:, hot].sum() == pytest.approx(3, rel=1e-5)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[hot] = False
    assert (probabilities[:, others] == 0).all()


def test_rounded_weights_are_reported(tmp_path, model):
    def rounded(drafter: Path) -> str | None:
        done = run("trtllm", "--model", model, "--drafter", drafter, "--output", tmp_path / "out")
        found = re.search(r"rounded to bfloat16: .*", done.output)
        return found and found[0]

    assert rounded(make_apple(tmp_path / "a")) is None
    assert rounded(make_own(tmp_path / "b", model)) == "rounded to bfloat16: 1 of 27 weights (drafter.lm_head.weight)"


def test_exit_dim_grows_only_where_it_must(tmp_path, model):
    def exit_dim(drafter: Path, tp: int) -> int:
        folder = export(model, drafter, tmp_path / "out", "--tp", tp)
        return json.loads((folder / "config.json").read_text())["redrafter_exit_dim"]

    own, odd = make_own(tmp_path / "own", model), make_own(tmp_path / "odd", model, None, exit_dim=61)
    assert [exit_dim(make_own(tmp_path / "all", model, None), tp) for tp in (1, 3)] == [60, 60]
    assert [exit_dim(own, tp) for tp in (1, 3)] == [64, 72]
    assert exit_dim(make_own(tmp_path / "full", model, exit_dim=64), 1) == 72
    assert [exit_dim(odd, tp) for tp in (1, 3)] == [61, 72]


@torch.no_grad()
def test_the_projection_is_left_out_only_where_it_is_the_identity(model):
    config = RecurrentConfig(HIDDEN, VOCAB, exit_dim=2 * HIDDEN, initial_state="zero")
    drafter = RecurrentDrafter(config, Target.from_folder(model))
    drafter.input.weight.copy_(torch.eye(2 * HIDDEN).roll(HIDDEN, 0))
    drafter.input.bias.zero_()
    assert "drafter.input_proj.weight" not in drafter_weights(drafter, 1)
    drafter.input.bias[5] = 1
    assert drafter_weights(drafter, 1)["drafter.input_proj.bias"][5] == 1
