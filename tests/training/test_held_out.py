"""Prompts to train on and prompts held out: none is in both parts."""

from __future__ import annotations

import itertools
import shutil
from collections import deque

import pytest
import torch
import typer

from redraft.prompts import Prompt
from redraft.training import parts
from redraft.training import prompts as teacher_prompts
from redraft.training.shards import Document, write_shard
from redraft.training.teacher_data import USUAL_CUTOFF, TeacherData
from tests.engines.tiny import write_model
from tests.training.teacher import RESERVED, UNRESERVED, begun_with, write_lines, write_teacher


@torch.no_grad()
@pytest.mark.parametrize(("texts", "apart"), [(UNRESERVED[:40], 1), (RESERVED[:3], 2), (["7", "8", "7 "], 1)])
def test_anybodys_prompts_are_distilled(target, tmp_path, monkeypatch, texts, apart):
    """Prompts without a source, some with: both parts are written, however few prompts there are, from none of the
    same."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    rows = [{"prompt": text} | ({"source": "mine"} if place % 3 == 1 else {}) for place, text in enumerate(texts)]
    data, held = map(begun_with, write_teacher(tmp_path, write_lines(tmp_path / "mine.jsonl", rows), 2000))
    assert held
    assert {text.strip() for text in data | held} == {text.strip() for text in texts}
    assert not {text.strip() for text in held} & {text.strip() for text in data}
    assert len({text.strip() for text in held}) == apart


@torch.no_grad()
def test_a_single_prompt_is_trained_on(target, tmp_path, monkeypatch, capsys):
    """Judging is by prompts that the target writes itself; where it must not write any, the file is refused."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    prompts = write_lines(tmp_path / "one.jsonl", [{"prompt": RESERVED[0]}])
    with pytest.raises(typer.BadParameter, match=r"one.jsonl has no prompt for --held-out, which shares none"):
        write_teacher(tmp_path, prompts)
    data, held = write_teacher(tmp_path, prompts, self_written=0.1)
    assert RESERVED[0] in begun_with(data)
    assert begun_with(held)
    assert RESERVED[0] not in begun_with(held)
    assert "held: 100 tokens held out, to judge drafters by; from the target's own prompts" in capsys.readouterr().err


@torch.no_grad()
def test_a_larger_file_moves_no_prompt_to_the_other_part(target, tmp_path, monkeypatch):
    """The first file has no prompt that is held out by the usual hash; the second has."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    few = [{"prompt": text} for text in UNRESERVED[:3]]
    first = [begun_with(part) for part in write_teacher(tmp_path, write_lines(tmp_path / "few.jsonl", few), 300)]
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 600)
    more = few + [{"prompt": text} for text in UNRESERVED[3:12] + RESERVED[:2]]
    data, held = write_teacher(tmp_path, write_lines(tmp_path / "more.jsonl", more), 2400)
    assert len(first[1]) == 1
    assert first[1] | set(RESERVED[:2]) <= begun_with(held)
    assert not begun_with(held) & begun_with(data)
    shutil.rmtree(held)
    shutil.copytree(data, tmp_path / "all")
    shutil.rmtree(data)
    data, held = write_teacher(tmp_path, write_lines(tmp_path / "other.jsonl", more[3:]), 300)
    with pytest.raises(typer.BadParameter, match="do not hold out the same prompts"):
        write_teacher(tmp_path, tmp_path / "more.jsonl", output=tmp_path / "all", held_out=held, tokens=9999)


def test_training_refuses_prompts_that_are_held_out(tmp_path):
    """Where folders of different files were brought together."""
    doc = Document(deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4, dtype=torch.bfloat16)] * 3)
    for name, meta in (("data", {}), ("usual", {"held_out": "true"}), ("more", {"held_out": "true"})):
        below = {"held_out_below": str(USUAL_CUTOFF + (name == "more"))}
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "shard-00000.safetensors", [doc], meta | below)
    assert TeacherData([tmp_path / "data", tmp_path / "usual"], 1, False).training
    with pytest.raises(ValueError, match=r"data may hold prompts that .*more holds out"):
        TeacherData([tmp_path / "data", tmp_path / "more"], 1, False)


@torch.no_grad()
def test_shares_are_drawn_as_they_are_named(target, tmp_path):
    prompts = [Prompt(str(place), "few" if place < 2 else "many", (str(place),)) for place in range(50)]
    even = teacher_prompts.draw_prompts(teacher_prompts.by_share(prompts, {}), 0)
    assert sorted(prompt.turns[0] for prompt in itertools.islice(even, 50)) == sorted(map(str, range(50)))
    shared = teacher_prompts.draw_prompts(teacher_prompts.by_share(prompts, {"few": 3, "many": 1}), 0)
    drawn = [prompt.category for prompt in itertools.islice(shared, 4000)]
    assert drawn.count("few") == pytest.approx(3000, abs=150)
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text, "source": "a"} for text in UNRESERVED[:9]])
    for shares, message in (("b=1", r"no source \['b'\]; it has \['a'\]"), ("a=-1", "above 0"), ("a", "form source=")):
        with pytest.raises(typer.BadParameter, match=message):
            write_teacher(tmp_path, lines, shares=shares)


@torch.no_grad()
def test_a_prompt_that_is_too_long_is_no_partner_of_the_others(target, tmp_path, monkeypatch, capsys):
    """The hashes of those that are used decide which is held out: here that of the long one is the lowest."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    lowest = min(("1" * length for length in range(353, 2000)), key=teacher_prompts.prompt_hash)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in (lowest, *UNRESERVED[:9])])
    data, held = map(begun_with, write_teacher(tmp_path, lines, 600))
    assert data | held == set(UNRESERVED[:9])
    assert "1 of 10 prompts have more than 108 tokens and are left out" in capsys.readouterr().err
