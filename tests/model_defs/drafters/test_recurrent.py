"""The recurrent drafter: its equations, its formats and its unrolled beam search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from tests.model_defs.drafters.test_drafters import windows_of

HIDDEN, VOCAB = 24, 111


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    rope = RopeConfig()
    return Target(TargetConfig(VOCAB, HIDDEN, 40, 1, 3, 1, 8, 1e-5, rope, 64, False, False, (2,))).eval()


def drafter_of(target: Target, hot: int | None = 37, **changes) -> RecurrentDrafter:
    config = RecurrentConfig(HIDDEN, VOCAB, **{"exit_dim": 30, "num_blocks": 2, "hot_vocabulary": hot} | changes)
    drafter = RecurrentDrafter(config, target, torch.arange(hot) * 3 if hot else None)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


@torch.no_grad()
def enumerate_beams(drafter: RecurrentDrafter, hidden: torch.Tensor, root: int, width: int, length: int, k: int):
    """Beam search over Python lists: candidates (log-probability, path) of every level."""
    h, levels = hidden[None], []
    expanded = [(0.0, [], drafter.first_state(torch.tensor([root])))]
    for _ in range(length):
        candidates = []
        for total, path, state in expanded:
            scores = F.log_softmax(drafter.logits(state, h), dim=-1)[0]
            for value, row in zip(*scores.topk(k), strict=True):
                token = int(drafter.hot_ids[row])
                candidates.append(
                    (total + value.item(), [*path, token], drafter.next_state(state, torch.tensor([token])))
                )
        levels.append([(total, path) for total, path, _ in candidates])
        expanded = sorted(candidates, key=lambda c: -c[0])[:width]
    return levels


@pytest.mark.parametrize("initial_state", ["embedding", "zero"])
@pytest.mark.parametrize(("hot", "head"), [(37, "target"), (None, "target"), (None, "own")])
def test_unrolled_beam_search_equals_plain_one(target, hot, head, initial_state):
    drafter = drafter_of(target, hot, head=head, initial_state=initial_state)
    width, length, k = 3, 4, 5
    hidden, tokens = torch.randn(3, HIDDEN), torch.tensor([5, 110, 0], dtype=torch.int32)
    with torch.no_grad():
        ids, sums, parents = BeamSearch(drafter, width, length, k)([hidden, tokens])
    for b in range(3):
        levels = enumerate_beams(drafter, hidden[b], int(tokens[b]), width, length, k)
        paths: dict[int, list[int]] = {}
        for level, expected in enumerate(levels):
            nodes = 1 if level == 0 else width
            found = []
            here: dict[int, list[int]] = {}
            for w in range(nodes):
                before = paths[int(parents[b, level, w])] if level else []
                for i in range(k):
                    here[w * k + i] = [*before, int(ids[b, level, w, i])]
                    found.append((float(sums[b, level, w, i]), here[w * k + i]))
            paths = here
            assert sorted(path for _, path in found) == sorted(path for _, path in expected)
            torch.testing.assert_close(
                torch.tensor([s for s, _ in sorted(found)]),
                torch.tensor([s for s, _ in sorted(expected)]),
                rtol=1e-5,
                atol=1e-4,
            )
            assert torch.isinf(sums[b, level, nodes:]).all()


def test_paper_state_starts_at_the_embedding(target):
    tokens = torch.tensor([7])
    torch.testing.assert_close(drafter_of(target).first_state(tokens), target.embedding(tokens))
    zero = drafter_of(target, initial_state="zero")
    expected = F.silu(zero.rnn_w(target.embedding(tokens)) + zero.rnn_u.bias)
    torch.testing.assert_close(zero.first_state(tokens), expected)


@pytest.mark.parametrize("exit_dim", [7, 31])
@torch.no_grad()
def test_a_head_of_its_own_starts_as_the_targets(target, exit_dim):
    windows, ids, logits = windows_of([[20]] * 60), torch.arange(0, VOCAB, 3), []
    for head in ("own", "target"):
        settings = {"exit_dim": str(exit_dim), "head": head}
        drafter = RecurrentDrafter(RecurrentDrafter.configure(target, len(ids), settings), target, ids)
        drafter.initialize(target, windows)
        logits.append(drafter.logits(drafter.first_state(windows.tokens[0]), windows.hidden[0]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)


def test_saved_drafter_loads_again(target, tmp_path: Path):
    drafter = drafter_of(target)
    drafter.save(tmp_path)
    loaded = RecurrentDrafter.load(tmp_path, target)
    assert torch.equal(loaded.hot_ids, drafter.hot_ids)
    state, hidden = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    torch.testing.assert_close(loaded.logits(state, hidden), drafter.logits(state, hidden), atol=0.1, rtol=0.05)


def test_drafter_of_another_target_is_refused(target, tmp_path: Path):
    drafter_of(target).save(tmp_path)
    rope = RopeConfig()
    other = Target(TargetConfig(VOCAB, 2 * HIDDEN, 40, 1, 6, 1, 8, 1e-5, rope, 64, False, False, (2,)))
    with pytest.raises(ValueError, match="hidden size 24 and vocabulary 111; this one has 48 and 111"):
        RecurrentDrafter.load(tmp_path, other)


@pytest.mark.parametrize("exit_dim", [2 * HIDDEN, 30])
def test_apple_checkpoint(target, tmp_path: Path, exit_dim: int):
    """Apple's order is [h, s], its state starts from zero and `input_proj` exists only where exit_dim is not 2H."""
    weights = {
        "rnn_u.weight": torch.randn(HIDDEN, HIDDEN) * 0.2,
        "rnn_u.bias": torch.randn(HIDDEN),
        "rnn_w.weight": torch.randn(HIDDEN, HIDDEN) * 0.2,
        "lm_head.0.linear.weight": torch.randn(exit_dim, exit_dim) * 0.2,
        "lm_head.0.linear.bias": torch.randn(exit_dim),
        "lm_head.1.weight": torch.randn(VOCAB, exit_dim),
    }
    if exit_dim != 2 * HIDDEN:
        weights |= {"input_proj.weight": torch.randn(exit_dim, 2 * HIDDEN), "input_proj.bias": torch.randn(exit_dim)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "exit_dim": exit_dim, "num_draft_layers": 1, "rnn": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = load_drafter(tmp_path, target)
    hidden, first, second = torch.randn(1, HIDDEN), torch.tensor([3]), torch.tensor([99])

    def apple_logits(s):
        x = torch.cat([hidden, s], dim=-1)
        if "input_proj.weight" in weights:
            x = F.linear(x, weights["input_proj.weight"], weights["input_proj.bias"])
        x = x + F.silu(F.linear(x, weights["lm_head.0.linear.weight"], weights["lm_head.0.linear.bias"]))
        return F.linear(x, weights["lm_head.1.weight"])

    def apple_step(s, token):
        e = target.embedding(token)
        return F.silu(
            F.linear(e, weights["rnn_w.weight"]) + F.linear(s, weights["rnn_u.weight"], weights["rnn_u.bias"])
        )

    s1 = apple_step(torch.zeros(1, HIDDEN), first)
    state = drafter.first_state(first)
    torch.testing.assert_close(drafter.logits(state, hidden), apple_logits(s1), atol=1e-4, rtol=1e-4)
    state = drafter.next_state(state, second)
    torch.testing.assert_close(
        drafter.logits(state, hidden), apple_logits(apple_step(s1, second)), atol=1e-4, rtol=1e-4
    )
