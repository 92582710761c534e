"""`redraft learn`: it trains while a service is idle only, goes on where it was, and begins from the right drafter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import typer

from redraft.cli import learn
from redraft.cli.learn import IdleService, next_generation, only_one, origin
from redraft.cli.steps import run_to_end
from redraft.compiler.built_from import built_from
from redraft.learning.generations import Generation, generation_folder
from redraft.learning.shard_file import add_shard, shard_bytes
from redraft.serving.processes import ServingError
from redraft.serving.settings import ServeSettings
from redraft.worker.client import WorkerError
from tests.conftest import ROOT
from tests.training.teacher import on_ranks, texts_of

BEATS = """import pathlib, sys, time
for beat in range(10_000):
    pathlib.Path(sys.argv[1]).write_text(str(beat))
    time.sleep(0.05)
"""


def test_a_program_is_stopped_while_it_may_not_run(tmp_path):
    """It goes on afterwards, and an interrupt ends it while it is stopped. In a process of its own, which a signal ends
    that is not handled."""
    program = "import pathlib, sys; from tests.cli.test_learn import *; stop_and_interrupt(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path / "beat")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"


def stop_and_interrupt(file: Path) -> None:
    """Let a program run, stop it, twice, and interrupt it while it is stopped."""
    heard = ["", ""]

    def goes_on() -> bool:
        heard.append(file.read_text() if file.exists() else "")
        return heard[-1] != heard[-2]

    def is_still() -> bool:
        goes_on()
        return len(heard) > 4 and len(set(heard[-4:])) == 1

    def asked() -> Iterator[bool]:
        for may_run, seen in ((True, goes_on), (False, is_still), (True, goes_on), (False, is_still)):
            deadline = time.monotonic() + 300
            while not seen():
                assert time.monotonic() < deadline, f"may run: {may_run}; beats {heard}"
                yield may_run
        os.kill(os.getpid(), signal.SIGTERM)
        yield False

    with pytest.raises(KeyboardInterrupt):
        run_to_end([sys.executable, "-c", BEATS, str(file)], partial(next, asked()))
    last = file.read_text()
    time.sleep(0.5)
    assert file.read_text() == last


def test_what_forbids_a_program_for_good_ends_it(tmp_path):
    """Also while it is stopped."""
    file = tmp_path / "beat"

    def asked() -> Iterator[bool]:
        while not file.exists():
            yield True
        yield False
        raise ValueError("the service has ended")

    with pytest.raises(ValueError, match="the service has ended"):
        run_to_end([sys.executable, "-c", BEATS, str(file)], partial(next, asked()))
    last = file.read_text()
    time.sleep(0.5)
    assert file.read_text() == last


def test_a_service_is_idle_when_it_has_had_no_request_for_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(learn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(learn, "WorkerClient", MagicMock())
    said_of_it: list[str] = []
    monkeypatch.setattr(learn.launcher, "is_running", lambda _: True)
    idle = IdleService(MagicMock(), said_of_it.append)
    answers: dict[float, Any] = {
        100: (0, 0, 3),
        101: (0, 0, 3),
        102: (0, 0, 3),
        103: (0, 0, 3),
        104: (1, 0, 4),
        105: (0, 0, 4),
        106: None,
        108: (0, 0, 4),
    }
    answers |= {109: (0, 1, 5), 110: (0, 0, 5), 112: (0, 0, 5), 113: (0, 0, 6), 114: (0, 0, 6), 116: (0, 0, 6)}

    def status(_: float) -> SimpleNamespace:
        if (answer := answers[now[0]]) is None:
            raise WorkerError("it is away")
        return SimpleNamespace(ready=True, running=answer[0], waiting=answer[1], submitted=answer[2])

    idle._client.status = status
    said = []
    for now[0] in answers:
        said.append(idle())
    assert not said_of_it
    idle_at = [at for at, is_idle in zip(answers, said, strict=True) if is_idle]
    assert idle_at == [103, 112, 116], "at 113 a request has come and gone"


def test_an_unfinished_generation_is_gone_on_with(tmp_path):
    assert next_generation(tmp_path) == 1
    generation_folder(tmp_path, 1).mkdir(parents=True)
    assert next_generation(tmp_path) == 1
    Generation(number=1).write(generation_folder(tmp_path, 1))
    assert next_generation(tmp_path) == 2


def test_it_begins_from_the_drafter_that_is_served(tmp_path, monkeypatch):
    for name in ("model", "drafter", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    command = f"redraft build --model {tmp_path / 'model'} --drafter {tmp_path / 'drafter'}"
    monkeypatch.setattr(learn.Manifest, "read", lambda _: SimpleNamespace(command=command))
    served, learned = tmp_path / "bundle", tmp_path / "learned"
    assert origin(None, None, served, learned) == (tmp_path / "model", tmp_path / "drafter")
    assert origin(None, tmp_path / "other", served, learned) == (tmp_path / "model", tmp_path / "other")
    monkeypatch.setattr(learn, "drafter_of", {tmp_path / "model": tmp_path / "other"}.get)
    assert origin(tmp_path / "model", None, None, learned) == (tmp_path / "model", tmp_path / "other")
    generation = generation_folder(learned, 1)
    generation.mkdir(parents=True)
    (generation / "config.json").write_text("{}")
    (learned / "served").symlink_to("generations/1")
    monkeypatch.setattr("redraft.cli.drafter_swap.model_digest", lambda _: "this")
    for of_model, begins_from in (("another", tmp_path / "other"), ("this", generation)):
        Generation(number=1, model=of_model).write(generation)
        assert origin(tmp_path / "model", None, None, learned) == (tmp_path / "model", begins_from)
    command = command.partition(" --drafter")[0]
    with pytest.raises(ValueError, match="bundle has no drafter: give one to begin from as --drafter"):
        origin(None, None, served, learned)


def test_no_service_is_said_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    with pytest.raises(typer.Exit):
        learn.main(tmp_path / "learn", run_dir=tmp_path / "run")
    assert "`redraft serve --learn` starts one, and --always trains without one" in capsys.readouterr().err
    assert not (tmp_path / "learn").exists()


@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
@pytest.mark.parametrize("gain", [(0.1, 0.2), (-0.1, 0.2)], ids=["better", "noise"])
def test_only_a_better_drafter_is_swapped_in(tmp_path, monkeypatch, gain, same, capsys):
    """And only for the bundle that it was judged beside, served still. With the training, the judge and the swap as
    stand-ins."""
    state = SimpleNamespace(settings=ServeSettings(bundle=tmp_path / "bundle"))
    monkeypatch.setattr(learn.RunDir, "read_state", lambda _: state)
    ran: list[list[str]] = []
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(learn, "watched", lambda *_: (lambda: True, state.settings))

    def build(*_: object) -> None:
        if not same:  # meanwhile somebody swaps
            state.settings = ServeSettings(bundle=tmp_path / "another")

    monkeypatch.setattr(learn, "with_drafter", build)
    monkeypatch.setattr(learn, "Manifest", MagicMock())
    monkeypatch.setattr(learn, "require_serving", lambda *_: None)
    monkeypatch.setattr(learn, "options_with", lambda *_: None)
    monkeypatch.setattr(learn, "model_digest", lambda _: "m")
    monkeypatch.setattr(learn, "origin", lambda *_: (tmp_path / "model", tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"drafter": "recurrent", "target_fingerprint": "f"}))
    monkeypatch.setattr(learn, "set_apart", lambda _, generation, *__: (generation / learn.TRAINED).mkdir(parents=True))
    monkeypatch.setattr(learn, "count_answers", lambda *_: 0)
    monkeypatch.setattr("redraft.cli.steps.run_to_end", lambda command, may_run: ran.append(command[3:]) or 0)
    monkeypatch.setattr(learn.Target, "from_folder", lambda _: None)
    measure = learn.Measure(answers=3, length_before=1.5, length=1.75, gain_low=gain[0], gain_high=gain[1])
    monkeypatch.setattr(learn, "judge", lambda *_: measure)
    learn.main(tmp_path, run_dir=tmp_path / "run", positions=9)
    generation = generation_folder(tmp_path, 1)
    assert Generation.of(generation) == Generation(
        number=1, began_from=str(tmp_path), model="m", positions=9, answers=0, measure=measure
    )
    assert not (generation / learn.TRAINED).exists()
    assert [words[0] for words in ran] == ["train", "swap"][: 1 + (same and gain[0] > 0)]
    assert ran[0][ran[0].index("--start-from") + 1] == str(tmp_path)
    said = capsys.readouterr().err
    assert ("the drafter before stays" in said) == (gain[0] < 0)
    assert ("another is served by now, beside which it was not judged" in said) == (gain[0] > 0 and not same)


@pytest.fixture
def trainings(tmp_path, monkeypatch) -> list[list[str]]:
    """The calls of a training that always fails, for a folder with answers of its own target and no service."""
    ran: list[list[str]] = []
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(learn, "origin", lambda *_: (tmp_path / "model", tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"drafter": "recurrent", "target_fingerprint": "f"}))
    monkeypatch.setattr("redraft.cli.steps.run_to_end", lambda command, may_run: ran.append(command[3:]) or 1)
    return ran


def served(folder: Path, answers: int) -> None:
    tokens, states = [np.arange(40, dtype=np.int32)] * answers, [np.ones((39, 3), np.uint16)] * answers
    add_shard(folder, shard_bytes(tokens, states, range(answers), {"target_fingerprint": "f", "source": "served"}))


def test_a_training_that_failed_is_begun_with_what_was_served_since_and_goes_on_from_its_checkpoint(
    tmp_path, trainings
):
    def learned(**options) -> int:
        with pytest.raises(typer.Exit):
            learn.main(tmp_path, always=True, **options)
        return sum(len(texts_of(file)) for file in (generation_folder(tmp_path, 1) / learn.TRAINED).iterdir())

    served(tmp_path, 50)
    assert learned() == 34
    served(tmp_path, 50)
    assert learned() == 84
    (generation_folder(tmp_path, 1) / learn.CHECKPOINT).touch()
    served(tmp_path, 50)
    assert learned() == 84, "it goes on"
    assert trainings[1] == trainings[2]
    assert learned(positions=7) == 128, "by other settings nothing goes on"


def test_too_few_answers_are_said_and_do_not_block_the_next_call(tmp_path, trainings, capsys):
    served(tmp_path, 17)
    for _ in range(2):
        with pytest.raises(typer.Exit):
            learn.main(tmp_path, always=True)
    assert capsys.readouterr().err.count("holds 17 answers in 1 shards, too few") == 2
    assert not trainings
    served(tmp_path, 50)
    with pytest.raises(typer.Exit):
        learn.main(tmp_path, always=True)
    assert len(trainings) == 1


def test_a_better_generation_whose_swap_failed_is_swapped_in_by_the_next_call(tmp_path, monkeypatch):
    """It is once: one that was served is not swapped in again after `swap --back`."""
    ran: list[list[str]] = []
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(learn, "watched", lambda *_: (lambda: True, ServeSettings(bundle=tmp_path / "bundle")))
    monkeypatch.setattr(learn, "origin", lambda *_: (tmp_path / "model", tmp_path))
    monkeypatch.setattr(learn, "with_drafter", lambda *_: None)
    monkeypatch.setattr(learn, "Manifest", MagicMock())
    monkeypatch.setattr(learn, "require_serving", lambda *_: None)
    monkeypatch.setattr(learn, "options_with", lambda *_: None)
    monkeypatch.setattr("redraft.cli.steps.run_to_end", lambda command, may_run: ran.append(command[3:]) or 0)
    (tmp_path / "config.json").write_text(json.dumps({"drafter": "recurrent", "target_fingerprint": "f"}))
    generation = generation_folder(tmp_path, 1)
    generation.mkdir(parents=True)
    measure = learn.Measure(answers=3, length_before=1.5, length=1.75, gain_low=0.1, gain_high=0.2)
    Generation(number=1, began_from=str(tmp_path), measure=measure).write(generation)
    learn.main(tmp_path, run_dir=tmp_path / "run")
    assert ran == [["swap", "--drafter", str(generation), "--run-dir", str(tmp_path / "run")]]
    with pytest.raises(typer.Exit):  # there is nothing to learn from
        learn.main(tmp_path, run_dir=tmp_path / "run")
    assert len(ran) == 1


def test_one_learns_from_a_folder_at_a_time(tmp_path, trainings, capsys):
    served(tmp_path, 50)
    with only_one(tmp_path), pytest.raises(typer.Exit):
        learn.main(tmp_path, always=True)
    assert f"another `redraft learn` is at work in {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "generations").exists()
    with pytest.raises(typer.Exit):
        learn.main(tmp_path, always=True)
    assert len(trainings) == 1


def test_ranks_end_together_where_one_finds_the_folder_taken(tmp_path, trainings):
    """It would catch a rank that waits for the answer of one that failed. Where none does, all train one generation."""
    served(tmp_path, 50)
    learned = partial(learn.main, tmp_path, always=True)
    with only_one(tmp_path):
        (first, said), *others = on_ranks(tmp_path / "logs", learned, learned, learned)
    assert first == 2
    assert said == f"redraft learn: rank 0: another `redraft learn` is at work in {tmp_path}\n"
    assert others == [(2, "")] * 2
    for status, said in on_ranks(tmp_path / "logs", learned, learned, learned):
        assert (status, f"--output {generation_folder(tmp_path, 1)} " in said) == (1, True), said


def test_a_bundle_that_no_drafter_can_be_swapped_into_is_said_before_the_training(
    tmp_path, monkeypatch, trainings, capsys
):
    served(tmp_path, 50)
    monkeypatch.setattr(learn, "watched", lambda *_: (lambda: True, ServeSettings(bundle=tmp_path / "bundle")))
    command = "redraft build --model m --methods methods.toml"
    monkeypatch.setattr(learn.Manifest, "read", lambda _: SimpleNamespace(command=command, built_from=None))
    with pytest.raises(typer.Exit):
        learn.main(tmp_path, run_dir=tmp_path / "run")
    assert "has several methods" in capsys.readouterr().err
    assert not trainings


def test_a_folder_that_is_not_there_is_not_made(tmp_path, trainings, capsys):
    with pytest.raises(typer.Exit):
        learn.main(tmp_path / "typo", always=True)
    assert "typo is not a folder: `redraft serve --learn` makes one" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_a_service_that_is_away_is_said_once(monkeypatch):
    now, said = [100.0], list[str]()
    monkeypatch.setattr(learn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(learn, "WorkerClient", MagicMock())
    idle = IdleService(MagicMock(), said.append)
    idle._client.status = MagicMock(side_effect=WorkerError("it is away"))
    monkeypatch.setattr(learn.launcher, "is_running", lambda _: now[0] < 400)
    for now[0] in (100, 130, 161, 300):
        assert not idle()
        assert bool(said) == (now[0] > 160)
    assert len(said) == 1
    for now[0] in (400, 459):  # it may be started again
        assert not idle()
    now[0] = 461
    with pytest.raises(ServingError, match="the service has ended; when it runs again, the same command goes on"):
        idle()


@pytest.mark.parametrize("what", ["the same", "another", "none"])
def test_what_is_swapped_in_is_judged_beside_what_is_served(tmp_path, monkeypatch, what, capsys):
    """By the files' content, wherever they were when the bundle was built."""
    for name in ("served", "given"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name if what == "another" else "{}")
    built = built_from({} if what == "none" else {"--drafter": str(tmp_path / "served")})
    shutil.rmtree(tmp_path / "served")
    monkeypatch.setattr(learn.Manifest, "read", lambda _: SimpleNamespace(built_from=built))
    monkeypatch.setattr(learn, "watched", lambda *_: (lambda: True, ServeSettings(bundle=tmp_path / "bundle")))
    monkeypatch.setattr(learn, "origin", lambda *_: (tmp_path / "model", tmp_path / "given"))
    monkeypatch.setattr(learn, "require_swap", MagicMock(side_effect=ValueError("it was allowed")))
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    with pytest.raises(typer.Exit):
        learn.main(tmp_path, run_dir=tmp_path / "run")
    expected = "given is not the drafter that is served: --no-swap" if what == "another" else "it was allowed"
    assert expected in capsys.readouterr().err


def test_what_it_waits_for_is_said_once(monkeypatch):
    now, said = [100.0], list[str]()
    monkeypatch.setattr(learn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(learn, "WorkerClient", MagicMock())
    idle = IdleService(MagicMock(), said.append)
    running = 0
    idle._client.status = lambda _: SimpleNamespace(ready=True, running=running, waiting=0, submitted=3)
    assert [idle() for now[0] in (200, 201, 204)] == [False, False, True], "who begins late is not kept busy"
    assert not said
    running = 1
    for now[0] in (205, 213, 215, 300):
        assert not idle()
        assert said == ["the service has requests: this goes on whenever it had none for 2 s"] * (now[0] > 214)


def test_what_is_too_old_is_removed_before_anything_is_set_apart(tmp_path, monkeypatch, trainings):
    served(tmp_path, 50)
    served(tmp_path, 30)
    os.utime(tmp_path / "shard-00000000.safetensors", (time.time() - 3 * 86400,) * 2)
    settings = ServeSettings(bundle=tmp_path / "bundle", learn=tmp_path, learn_days=2)
    monkeypatch.setattr(learn, "Manifest", MagicMock())
    monkeypatch.setattr(learn, "require_serving", lambda *_: None)
    monkeypatch.setattr(learn, "options_with", lambda *_: None)
    monkeypatch.setattr(learn, "watched", lambda *_: (lambda: True, settings))
    with pytest.raises(typer.Exit):
        learn.main(tmp_path, run_dir=tmp_path / "run")
    assert {file.name for file in tmp_path.rglob("shard-*")} == {"shard-00000001.safetensors"}
