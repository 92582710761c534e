"""`redraft distill`: what it writes, goes on with and refuses."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from redraft.cli import distill
from redraft.model_defs.target.attention import causal_attend
from redraft.training import conversations, parts, writing
from redraft.training.shards import Document, Shards, write_shard
from tests.conftest import exit_code_of
from tests.engines.tiny import write_model
from tests.training.teacher import UNRESERVED, begun_with, prompts_of, texts_of, write_lines, write_teacher


@torch.no_grad()
def test_what_enters_layers_stands_after_the_hidden_states(target, tmp_path):
    """Layer 2 of 2 is what the final norm takes. A folder holds features of the same layers only."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    data, _ = write_teacher(tmp_path, lines, 300, target_layers="0+2")
    shard = load_file(data / "shard-00000.safetensors")
    end = int(shard["offsets"][1]) - 1  # the last token's features are those of the one before
    hidden, first, last = shard["hidden"][:end].float().chunk(3, dim=-1)
    states = target(shard["tokens"][None, :end].int(), causal_attend(target.config, end))
    torch.testing.assert_close(hidden, states.hidden[0], atol=0.05, rtol=0.05)
    torch.testing.assert_close(first, target.embedding(shard["tokens"][:end].int()), atol=0.05, rtol=0.05)
    torch.testing.assert_close(target.norm(last), states.hidden[0], atol=0.05, rtol=0.05)
    with pytest.raises(typer.BadParameter, match=r"holds features of the layers 0\+2, asked for are none"):
        write_teacher(tmp_path, lines, 600)


def test_a_killed_run_goes_on_with_what_was_under_way(target, tmp_path, monkeypatch):
    """`kill -9` before a document has ended: the same command keeps the answers as far as they were."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:40]])
    step, steps = conversations.Generator._step, itertools.count()

    def killed(*arguments):
        if next(steps) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(conversations.Generator, "_step", killed)
        patch.setattr(writing, "SHARD_S", 0.0)
        run = partial(write_teacher, tmp_path, lines, 4000, max_tokens=60)
        assert exit_code_of(run) == -signal.SIGKILL
    (kept,) = (tmp_path / "held").glob("running-*")
    before = texts_of(kept)
    assert len(before) >= 4
    with torch.no_grad():
        parts = write_teacher(tmp_path, lines, 4000, max_tokens=60)
    for folder, least in zip(parts, (4000, 2000), strict=True):
        texts = [text for file in sorted(folder.glob("shard-*")) for text in texts_of(file)]
        assert least <= sum(map(len, texts)) < least + 80, "no more than a step of each slot and a document"
        assert not list(folder.glob("running-*"))
    assert all(text in texts for text in before)


@torch.no_grad()
def test_responses_that_are_too_short_are_left_out(target, tmp_path, monkeypatch, capsys):
    """Where all of them are, there is nothing to read."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 20)
    write_model(target, tmp_path)
    rows = [{"prompt": text, "response": "1234567"} for text in UNRESERVED[:9]]
    reads = {"source": distill.Source.prefill}
    with pytest.raises(typer.BadParameter, match=r"no response of .*short.jsonl has 8 tokens"):
        write_teacher(tmp_path, write_lines(tmp_path / "short.jsonl", rows), 100, **reads)
    mixed = [row | ({"response": "12345678"} if place < 4 else {}) for place, row in enumerate(rows)]
    data, held = map(begun_with, write_teacher(tmp_path, write_lines(tmp_path / "mine.jsonl", mixed), 100, **reads))
    assert data | held == set(UNRESERVED[:4])
    assert "5 of 9 responses have fewer than 8 tokens and are left out" in capsys.readouterr().err


@torch.no_grad()
def test_runs_of_a_folder_go_through_the_prompts_in_turn(target, tmp_path):
    """A run begins with those that no other has drawn."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:30]])
    begun: list[list[str]] = []
    for tokens in (120, 240):
        write_teacher(tmp_path, lines, tokens, held_out=None)
        files = sorted((tmp_path / "data").glob("shard-*"))[len(begun) :]
        shards = [load_file(file) for file in files]
        begun.append([text for shard in shards for text in prompts_of(shard)])
    assert len(begun[0]) >= 4
    assert len(begun[1]) >= 4
    assert len({*begun[0], *begun[1]}) == len(begun[0]) + len(begun[1]) <= 30


def test_a_removed_shards_number_is_not_given_again(tmp_path):
    """Nor its seed: the others stay as they are."""
    doc = Document(deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4, dtype=torch.bfloat16)] * 3)
    for number in (0, 2):
        write_shard(tmp_path / f"shard-{number:05d}.safetensors", [doc], {})
    shards = Shards(tmp_path, {"model": "tiny"})
    assert shards.number == 3
    shards.add([doc], [])
    assert [file.stem[-1] for file in sorted(tmp_path.glob("shard-*"))] == ["0", "2", "3"]


@torch.no_grad()
def test_shards_of_another_model_or_division_are_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    data, held = write_teacher(tmp_path, lines, 200)
    (file,) = held.glob("shard-*")
    moved = shutil.copy(file, data / "shard-00007.safetensors")
    with pytest.raises(typer.BadParameter, match=r"shard-00007.safetensors is of another division .*: remove it"):
        write_teacher(tmp_path, lines, 300)
    Path(moved).unlink()
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(typer.BadParameter, match=r"is of another .* than the one that is there now: give another"):
        write_teacher(tmp_path, lines, 300)


@torch.no_grad()
def test_shards_of_other_prompts_or_another_template_are_not_taken_for_these(target, tmp_path, monkeypatch, capsys):
    """Shards that tell neither, as older ones, are taken."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    rows = [{"prompt": text} for text in UNRESERVED[:9]]
    first, more = (write_lines(tmp_path / f"{n}.jsonl", rows[:n]) for n in (5, 9))
    write_teacher(tmp_path, first, 200)
    write_teacher(tmp_path, first, 200)
    assert "already hold what is asked for" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter, match=r"data and .*held already hold .* of other prompts: remove or rename"):
        write_teacher(tmp_path, more, 200)
    write_teacher(tmp_path, more, 400)
    assert "hold conversations of other prompts, which are kept" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(typer.BadParameter, match=r"is of another chat template: remove or rename .*data"):
        write_teacher(tmp_path, more, 900)
    for file in (file for folder in ("data", "held") for file in (tmp_path / folder).iterdir()):
        with safe_open(file, framework="pt") as shard:
            meta = {name: text for name, text in shard.metadata().items() if name not in ("prompts", "chat_template")}
        save_file(load_file(file), file, meta)
    write_teacher(tmp_path, first, 200)
    assert "already hold what is asked for" in capsys.readouterr().err


def test_more_tokens_than_the_disk_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64_000_000_000))
    part = parts.Part(False, Shards(tmp_path / "new", {"model": "tiny"}), 60_000_000, [])
    part.shards.tokens = 5_000_000
    parts.require_space([part], 1156)
    with pytest.raises(ValueError, match=r"64\.0 GB free: at most --tokens 50363321 fit"):
        parts.require_space(
            [part, parts.Part(True, Shards(tmp_path / "held", {"model": "tiny"}), 10_000_000, [])], 1156
        )
    part.wanted = 90_000_000
    with pytest.raises(
        ValueError, match=r"--tokens 90000000 take 104\.0 GB, .* has 64\.0 GB free: at most --tokens 60363321 fit"
    ):
        parts.require_space([part], 1156)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=600_000))
    part.wanted, part.shards.tokens = 1_000, 0
    with pytest.raises(ValueError, match=r"--tokens 1000 take 1 MB, .* 0 kB are there, and .* has 600 kB free"):
        parts.require_space([part], 1156)


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": "nameless.jsonl"}, "nameless.jsonl, line 2: no turns, prompt, .* among 'source': name the field"),
        ({"prompts": "long.jsonl"}, "all 3 prompts of .*long.jsonl have more than 127 tokens: shorten"),
        ({"prompts": "half.jsonl"}, "half.jsonl, line 2: .*surrogates not allowed"),
        ({"source": distill.Source.prefill}, "needs a `response`, the prompt .* has none"),
        ({"source": distill.Source.prefill, "engine": True}, "--engine builds a bundle that generates"),
        ({"bundle": "bundle", "engine": True}, "--engine builds a bundle that generates"),
    ],
)
def test_input_that_is_not_there_is_refused(target, tmp_path, monkeypatch, given, message):
    """In one line, before a folder is made for the output or a shard is written."""
    write_model(target, tmp_path)
    rows = [json.dumps({"source": "own", "prompt": str(i)}) + "\n" for i in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    (tmp_path / "nameless.jsonl").write_text(rows[0] + '{"source": "own"}\n')
    (tmp_path / "half.jsonl").write_text(rows[0] + '{"prompt": "\\ud800"}\n')
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "1" * n}) + "\n" for n in (353, 400, 500)))
    paths = {
        key: tmp_path / value if isinstance(value, str) and key != "source" else value for key, value in given.items()
    }
    where = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "data"}
    with pytest.raises(typer.BadParameter, match=message):
        distill.main(**(where | paths), tokens=100)
    assert not (tmp_path / "data").exists()
