"""Replaying drafters over known answers gives what drafting live gives, at every place; and tables made of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.replay import ablation, beam_packing, beam_shapes
from benchmarks.replay.answers import Answer, read, write
from benchmarks.replay.replay import Outcome, Replayer, cut, roots_of
from model_defs.drafters.base import Drafter
from model_defs.drafters.hidden_state import HiddenStateDrafter
from model_defs.drafters.registry import DRAFTERS
from model_defs.target.attention import DenseCache, HeadNorms, causal_attend
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from redraft.decoding.construction import beams_of, best_first
from redraft.decoding.packing import pack_beams
from redraft.decoding.token_tree import TokenTree

VOCAB, HIDDEN = 111, 24
SETTINGS: dict[str, dict] = {
    "recurrent": {"exit_dim": 30, "num_blocks": 1},
    "hidden_state": {"info_vocabulary": 37, "info_rank": 5},
    "medusa": {"heads": 3},
}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    target = Target(TargetConfig(VOCAB, HIDDEN, 40, 2, 6, 2, 4, 1e-5, RopeConfig(), 64, True, False, (2,)))
    for parameter in target.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return target.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    """Greedy answers of 23, 9 and 14 tokens."""
    torch.manual_seed(3)
    found = []
    for prompt, length in ((5, 23), (11, 9), (1, 14)):
        tokens = torch.randint(VOCAB, (prompt,))
        for _ in range(length):
            hidden = target(tokens[None], causal_attend(target.config, len(tokens), torch.device("cpu"))).hidden[0]
            tokens = torch.cat([tokens, target.lm_head(hidden[-1:]).argmax(-1)])
        hidden = target(tokens[None], causal_attend(target.config, len(tokens), torch.device("cpu"))).hidden[0]
        found.append(Answer(tokens, hidden, prompt))
    return found


def drafter_of(target: Target, name: str, seed: int = 1) -> Drafter:
    kind = DRAFTERS[name]
    torch.manual_seed(seed)
    drafter = kind(kind.configure(target, 53, SETTINGS.get(name, {})), target, torch.randperm(VOCAB)[:53])
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    return drafter.eval().requires_grad_(False)


def chain_at(drafter: HiddenStateDrafter, answer: Answer, place: int, levels: int) -> Tensor:
    """Raw logits [L, K] of a chain drafted with a cache from the pairs up to one place."""
    cache = DenseCache(drafter.layer_config, 1, 64, answer.hidden)
    count = answer.start + place
    first = drafter.ingest(answer.hidden[None, :count], answer.tokens[None, 1 : count + 1], cache.attend)[0, -1]
    cache.starts += count

    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        out = cache.attend(layer, qkv, norms)
        cache.starts += 1
        return out

    return drafter.raw_logits(drafter.chain(first[None, None], levels, attend)[:, 0, 0])


@torch.no_grad()
def test_a_chain_replayed_at_a_place_has_seen_the_text_up_to_its_root_alone(target, answers):
    """Off by one in the hidden states or the roots, or a chain that sees the answer's future, gives other drafts."""
    drafter = drafter_of(target, "hidden_state")
    assert isinstance(drafter, HiddenStateDrafter)
    replayer = Replayer(drafter, 3)
    for answer in answers:
        drafts = replayer.draft(answer, width=1, length=3)
        for place, root in enumerate(answer.text[:-1]):
            token, expected = root, []
            for logits in chain_at(drafter, answer, place, 3):
                row = logits.clone()
                entry = int(drafter.info.row_of[token])
                info = drafter.info.rows[entry].float() * drafter.info.scales[entry]
                row[: len(info)] += info
                token = int(drafter.hot_ids[row.argmax()])
                expected.append(token)
            assert drafts.candidates[place, :, 0, 0].tolist() == expected


@torch.no_grad()
def test_a_recurrent_draft_starts_from_the_state_that_gave_its_root(target, answers):
    drafter = drafter_of(target, "recurrent")
    drafts = Replayer(drafter, 2).draft(answers[0], width=2, length=2)
    for place, root in enumerate(answers[0].text[:-1]):
        hidden = answers[0].hidden[answers[0].start + place - 1][None]
        read = drafter.hidden(drafter.first_state(torch.tensor([root])), drafter.context(hidden))
        assert drafts.candidates[place, 0, 0].tolist() == drafter.most_likely(read, 2)[1][0].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_places_are_drafted_alike_alone_and_together(target, answers, name, monkeypatch):
    replayer = Replayer(drafter_of(target, name), 3)
    together = replayer.draft(answers[0], width=3, length=3, candidates=4)
    monkeypatch.setattr("benchmarks.replay.replay.ROWS_AT_ONCE", 7)
    alone = replayer.draft(answers[0], width=3, length=3, candidates=4)
    np.testing.assert_array_equal(together.candidates, alone.candidates)
    np.testing.assert_array_equal(together.parents, alone.parents)
    np.testing.assert_allclose(together.log_probs, alone.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_shorter_beams_are_the_first_levels_of_longer_ones(target, answers, name):
    replayer = Replayer(drafter_of(target, name), 3)
    shorter, longer = (replayer.draft(answers[1], 3, length) for length in (2, 3))
    roots = roots_of(answers[1])
    trees = [pack_beams(roots, *beams_of(drafts, 3)) for drafts in (shorter, cut(longer, 2))]
    assert [[node[:2] for node in nodes] for nodes in trees[0].nodes] == [
        [node[:2] for node in nodes] for nodes in trees[1].nodes
    ]


def test_a_drafter_that_reads_its_draft_is_refused(target):
    with pytest.raises(ValueError, match="a drafter 'eagle' attends to its own draft tokens"):
        Replayer(drafter_of(target, "eagle"), 3)


def test_steps_of_an_answer_by_hand():
    """Text 7 8 9 4 5: the tree at 7 holds 8 9 and a wrong third, that at 4 nothing right."""
    root_only = [(0, -1, 0.0)]
    tree = TokenTree.from_nodes(
        [
            [(7, -1, 0.0), (8, 0, -1.0), (9, 1, -2.0), (5, 2, -2.0), (6, 0, -3.0)],
            root_only,
            root_only,
            [(4, -1, 0.0), (3, 0, -1.0)],
        ]
    )
    outcome = Outcome()
    outcome.follow(tree, [7, 8, 9, 4, 5], depths=3)
    assert (outcome.accepted, outcome.rows) == ([2, 0], [5, 2])
    assert outcome.acceptance_length == 2
    # At 4, the answer has one token left: only depth 1 is offered.
    assert (outcome.offered_by_depth, outcome.accepted_by_depth) == ([2, 1, 1], [1, 1, 0])
    assert outcome.conditional == [0.5, 1, 0]


def test_a_drafter_that_knows_the_target_accepts_everything(target, answers):
    """Trees that hold the answer gain length + 1 tokens at each step but the last."""
    answer = answers[0]
    outcome = Outcome()
    beams = np.array([[answer.text[i + 1 : i + 4]] for i in range(len(answer.text) - 4)], np.int32)
    trees = pack_beams(roots_of(answer)[: len(beams)], beams)
    outcome.follow(trees, answer.text[:-3], 3)
    assert set(outcome.accepted[:-1]) == {3}


def folders(target: Target, answers: list[Answer], tmp_path: Path, monkeypatch, *drafters: str) -> list[str]:
    write(tmp_path / "answers", answers)
    monkeypatch.setattr(Target, "from_folder", lambda folder: target)
    paths = []
    for seed, name in enumerate(drafters):
        drafter_of(target, name, seed).save(tmp_path / f"{name}-{seed}")
        paths.append(str(tmp_path / f"{name}-{seed}"))
    return ["--model", "m", "--answers", str(tmp_path / "answers"), "--output", str(tmp_path / "r.json")] + (
        ["--drafters", *paths] if len(paths) > 1 else ["--drafter", *paths]
    )


def test_packing_table(target, answers, tmp_path, monkeypatch, capsys):
    arguments = folders(target, answers, tmp_path, monkeypatch, "recurrent")
    beam_packing.main([*arguments, "--widths", "2", "7", "--length", "3"])
    rows = json.loads((tmp_path / "r.json").read_text())["widths"]
    drafter = drafter_of(target, "recurrent", 0)
    drafter.to(torch.bfloat16).float()
    kept = []
    for answer in read(tmp_path / "answers"):
        beams, _ = beams_of(Replayer(drafter, 3).draft(answer, 7, 3), 7)
        tree = pack_beams(roots_of(answer), beams)
        steps = Outcome()
        steps.follow(tree, answer.text, 3)
        kept += [n - 1 for n in steps.rows]
        distinct = [len({tuple(beam[: n + 1]) for beam in place.tolist() for n in range(3)}) for place in beams]
        assert distinct == [len(nodes) - 1 for nodes in tree.nodes]
    assert rows[1]["unpacked"] == 21
    assert rows[1]["packed"] == pytest.approx(np.mean(kept))
    assert rows[1]["fewer"] == pytest.approx(1 - np.mean(kept) / 21)
    assert rows[1]["p1"] <= rows[1]["packed"] <= rows[1]["p99"]
    assert "ReDrafter, figure 6" in capsys.readouterr().out


def test_shapes_of_two_drafters(target, answers, tmp_path, monkeypatch, capsys):
    arguments = folders(target, answers, tmp_path, monkeypatch, "recurrent", "recurrent")
    beam_shapes.main([*arguments, "--widths", "1", "4", "--lengths", "1", "3"])
    drafters = json.loads((tmp_path / "r.json").read_text())["drafters"]
    assert list(drafters) == ["recurrent-0", "recurrent-1"]
    for rows in drafters.values():
        by_shape = {(row["width"], row["length"]): row for row in rows}
        assert len(by_shape) == 4
        assert by_shape[4, 1]["rows_per_step"] == 5
        assert by_shape[1, 3]["rows_per_step"] == 4
        # With one level, the widest tree holds the others' tokens.
        assert by_shape[4, 1]["acceptance_length"] >= by_shape[1, 1]["acceptance_length"]
    printed = capsys.readouterr().out
    first, second = (drafters[name][3]["acceptance_length"] for name in drafters)
    assert "recurrent-0 over recurrent-1" in printed
    assert f"{first / second - 1:+.1%}" in printed


def test_ablation_table(target, answers, tmp_path, monkeypatch, capsys):
    arguments = folders(target, answers, tmp_path, monkeypatch, "hidden_state", "hidden_state")
    ablation.main([*arguments, "--nodes", "9"])
    drafters = json.loads((tmp_path / "r.json").read_text())["drafters"]
    for row in drafters.values():
        assert len(row["conditional"]) == 3
        assert row["steps"] >= row["offered"][0] >= row["accepted"][0] >= row["accepted"][1]
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["accepted"]) / row["steps"])
    assert "Lyanna, table 1" in capsys.readouterr().out


@torch.no_grad()
def test_trees_are_of_the_size_that_was_asked_for(target, answers):
    drafts = Replayer(drafter_of(target, "hidden_state"), 3).draft(answers[0], 4, 3)
    tree = best_first(drafts, roots_of(answers[0]), 16)
    assert {len(nodes) for nodes in tree.nodes} == {17}
    assert max(path.bit_count() for paths in tree.ancestors for path in paths) <= 4


def test_answers_come_back_as_they_were_written(target, answers, tmp_path):
    write(tmp_path, [*answers, Answer(answers[0].tokens[:6], answers[0].hidden[:6], 5)])
    back = read(tmp_path)
    assert [answer.text for answer in back] == [answer.text for answer in answers]
    assert [answer.start for answer in back] == [5, 11, 1]
    torch.testing.assert_close(back[1].hidden, answers[1].hidden.to(torch.bfloat16).float())
    assert [len(answer.text) for answer in read(tmp_path, count=2, max_tokens=10)] == [10, 9]
    with pytest.raises(ValueError, match=r"shard-00000.safetensors.*benchmarks.replay.answers"):
        read(tmp_path / "elsewhere")
