"""`redraft train`: drafters that learn, runs that go on, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors import safe_open

from redraft.cli import train as command
from redraft.learning.shard_file import add_shard, shard_bytes
from redraft.model_defs.drafters.eagle import EagleDrafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from redraft.training import run as training_run
from redraft.training.plan import usual_rows
from redraft.training.shards import write_shard
from redraft.training.teacher_data import TeacherData
from tests.training.teacher import SHAPES, VOCAB, generate, train


def test_a_gpu_carries_the_32k_most_frequent_of_more_than_40k_tokens():
    sizes = (49_152, 40_001, 40_000, 111)
    assert [usual_rows(size, "cuda") for size in sizes] == [32768, 32768, 40_000, 111]
    assert [usual_rows(size, "cpu") for size in sizes] == [12288, 12288, 12288, 111]
    settings = partial(training_run.settings_of, HiddenStateDrafter, vocab_size=49_152)
    assert settings(["info_rank=8"], device="cuda") == {"info_vocabulary": "32768", "info_rank": "8"}
    assert settings(["info_vocabulary=9"], device="cuda") == {"info_vocabulary": "9"}
    assert settings([], device="cpu") == training_run.settings_of(EagleDrafter, [], 49_152, "cuda") == {}


@pytest.mark.parametrize("drafter", SHAPES)
def test_training_learns(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Random models answer in short cycles, which a drafter learns fast, from random weights too."""
    monkeypatch.setattr(command.DRAFTERS[drafter], "initialize", lambda *_: None)
    log = train(taught, tmp_path, drafter, 6400, peak_rate=3e-3)
    assert log[-1]["positions"] >= 6400 > log[-1]["positions"] - 4 * 24
    assert log[-1]["loss"] < log[0]["loss"] - 0.01
    assert log[-1]["chain_acceptance_length"] > 1.5
    assert json.loads((tmp_path / "config.json").read_text())["acceptance_ratio"] == log[-1]["acceptance_ratio"]
    with safe_open(tmp_path / "drafter.safetensors", framework="pt") as file:
        assert file.get_tensor("hot_ids").shape == (64,)
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.int32, torch.bfloat16}  # noqa: SIM118


def test_a_softmax_head_of_its_own_is_trained(taught: Path, tmp_path: Path):
    """From the target's rows on, which it leaves: the whole vocabulary, and blocks narrower than the hidden states."""
    settings = ["head=own", "exit_dim=30", "num_blocks=1", "initial_state=zero"]
    log = train(taught, tmp_path, "recurrent", 4800, settings=settings, hot_tokens=0, peak_rate=3e-3)
    assert log[-1]["loss"] < log[0]["loss"] - 0.01
    target = Target.from_folder(taught)
    trained = load_drafter(tmp_path, target)
    assert (trained.config.head, trained.head_weight.shape) == ("own", (VOCAB, 30))
    rows = target.lm_head.weight.detach()
    nearest = torch.linalg.lstsq(rows, trained.head_weight.detach()).solution
    assert (rows @ nearest - trained.head_weight).norm() > 0.01 * trained.head_weight.norm()


@pytest.mark.parametrize("drafter", ["recurrent", "hidden_state"])
def test_a_run_that_was_stopped_goes_on_identically(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Stopped at a checkpoint and started again: the same batches, rates and weights as a run in one piece."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    log = train(taught, whole, drafter, 2400)
    save = training_run.save_checkpoint

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_run, "save_checkpoint", save_and_stop)
        with pytest.raises(SystemExit):
            train(taught, parts, drafter, 2400)
    timing = {"hours", "rate", "minutes_left"}
    for again, expected in zip(train(taught, parts, drafter, 2400), log[1:], strict=True):
        assert {key: again[key] for key in again.keys() - timing} == {
            key: expected[key] for key in again.keys() - timing
        }
    assert (parts / "drafter.safetensors").read_bytes() == (whole / "drafter.safetensors").read_bytes()


def test_a_run_is_killed_between_two_lines_of_its_log(taught: Path, tmp_path: Path, monkeypatch):
    """It goes on from a checkpoint of the clock's, and logs what a run in one piece logs."""
    log = train(taught, tmp_path / "whole", "recurrent", 2400)
    steps, save = itertools.count(1), training_run.save_checkpoint

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        if next(steps) == 40:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_run, "CHECKPOINT_S", 0.0)
        patched.setattr(training_run, "save_checkpoint", save_and_stop)
        with pytest.raises(SystemExit):
            train(taught, tmp_path / "parts", "recurrent", 2400)
    assert len(log) >= 3
    assert (tmp_path / "parts/log.jsonl").read_text().count("\n") == 1
    timing = {"hours", "rate", "minutes_left"}
    for again, expected in zip(train(taught, tmp_path / "parts", "recurrent", 2400), log, strict=True):
        assert [again[key] for key in again.keys() - timing] == [expected[key] for key in again.keys() - timing]


@pytest.mark.parametrize(("shards", "judged", "trained"), [(1, 0, 1), (2, 1, 1), (3, 1, 2)])
def test_whatever_number_of_shards_is_trained_on(taught: Path, tmp_path: Path, capsys, shards, judged, trained):
    """A single one is not judged by; conversations that were held out are, however few."""
    (tmp_path / "data").mkdir()
    for shard in range(shards):
        shutil.copy(taught / f"data/shard-{shard:05d}.safetensors", tmp_path / "data")
    log = train(taught, tmp_path / "drafter", "recurrent", 100, data=[tmp_path / "data"], held_out_shards=None)
    assert ("chain_acceptance_length" in log[-1]) == (judged > 0)
    teacher = TeacherData([tmp_path / "data"], None, False)
    assert (len(teacher.evaluation), len(teacher.training)) == (judged, trained)
    assert f"on {trained} shard" in capsys.readouterr().err
    docs = generate(Target.from_folder(taught), 4, [[11]])
    (tmp_path / "held").mkdir()
    write_shard(tmp_path / "held/shard-00000.safetensors", docs, {"held_out": "true"})
    teacher = TeacherData([tmp_path / "data", tmp_path / "held"], None, False)
    assert (len(teacher.evaluation), len(teacher.training)) == (1, shards)


def test_shards_of_less_than_a_batch_are_trained_on_together(taught: Path, tmp_path: Path):
    """A clock closes them where the target is slow."""
    (tmp_path / "data").mkdir()
    target = Target.from_folder(taught)
    for shard in range(7):
        docs = generate(target, 1, [[11 + shard]])
        write_shard(tmp_path / f"data/shard-{shard:05d}.safetensors", docs, {})
    log = train(taught, tmp_path / "drafter", "recurrent", 100, data=[tmp_path / "data"], held_out_shards=None, batch=8)
    assert log[-1]["positions"] >= 100


def test_a_run_goes_on_from_another_drafter(taught: Path, tmp_path: Path):
    """Its shape is kept, its weights are the start; another kind is refused."""
    log = train(taught, tmp_path / "first", "eagle", 2400)
    more = train(taught, tmp_path / "second", "eagle", 200, start_from=tmp_path / "first", peak_rate=1e-9)
    assert more[0]["chain_acceptance_length"] == pytest.approx(log[-1]["chain_acceptance_length"], abs=0.02)
    with pytest.raises(typer.BadParameter, match="holds a drafter 'eagle', the command trains one 'medusa'"):
        train(taught, tmp_path / "third", "medusa", 200, start_from=tmp_path / "first")


def test_unfit_commands_are_refused(taught: Path, tmp_path: Path):
    train(taught, tmp_path, "hidden_state", 100)
    with pytest.raises(typer.BadParameter, match=r"run with labels soft, batch 4, the command asks for labels hard, b"):
        train(taught, tmp_path, "hidden_state", 100, labels="hard", batch=8)
    with pytest.raises(typer.BadParameter, match=r"run with positions 100, the command asks for positions 200; for"):
        train(taught, tmp_path, "hidden_state", 200)
    with pytest.raises(typer.BadParameter, match=r"run with data 2 shards \(\w+\), the command asks for data 1 shards"):
        train(taught, tmp_path, "hidden_state", 100, held_out_shards=2)
    with pytest.raises(typer.BadParameter, match=r"info_rank=8.*asks for.*info_rank=4"):
        train(taught, tmp_path, "hidden_state", 200, settings=["info_vocabulary=40", "info_rank=4"])
    with pytest.raises(typer.BadParameter, match=r"layers none, the drafter reads \(0, 1, 2\): .*layers 0\+1\+2"):
        train(taught, tmp_path / "new", "eagle3", 200, data=[taught / "data"])
    assert not (tmp_path / "new").exists()


def test_no_drafter_is_without_its_bigrams(taught: Path, tmp_path: Path, monkeypatch):
    """They are there before the drafter is, and whole: a build would go on without those that are missing."""

    def cut_short(file, table) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(command.np, "save", cut_short)
        with pytest.raises(typer.BadParameter, match="no space left"):
            train(taught, tmp_path, "recurrent", 100)
    assert not {"bigrams.npy", "drafter.safetensors"} & {file.name for file in tmp_path.iterdir()}
    train(taught, tmp_path, "recurrent", 100)
    assert np.load(tmp_path / "bigrams.npy").shape == (VOCAB,)


def test_what_was_served_is_in_no_table_of_bigrams(tmp_path: Path):
    """The table of the drafter that it began from stays."""
    tokens, states = [np.array([5, 7, 5, 7])], [np.ones((3, 4), np.uint16)]
    add_shard(tmp_path, shard_bytes(tokens, states, [1], {"source": "served"}))
    table = tmp_path / "bigrams.npy"
    command.save_bigrams(table, [tmp_path], VOCAB, tmp_path / "first")
    assert not table.exists()
    (tmp_path / "first").mkdir()
    np.save(tmp_path / "first" / "bigrams.npy", np.full(VOCAB, 9, np.int32))
    command.save_bigrams(table, [tmp_path], VOCAB, tmp_path / "first")
    assert (np.load(table) == 9).all()
