"""Teacher data and training on several ranks: what they share, what they refuse, and what is left of one that dies."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from redraft.bundle.backends import Precision
from redraft.bundle.manifest import Manifest
from redraft.cli import distill, drafter, steps
from redraft.cli import train as train_command
from redraft.compiler.built_from import built_from, require_model
from redraft.errors import BundleError
from redraft.model_defs import files
from redraft.training import conversations, distillation, parts, plan, prompts, ranks, shards, writing
from redraft.training import run as training_run
from redraft.training.ranks import ALONE, Ranks, ranked, this_rank
from redraft.training.teacher_data import TeacherData
from tests.conftest import ROOT
from tests.engines.tiny import write_model
from tests.training.teacher import (
    RESERVED,
    UNRESERVED,
    on_ranks,
    prompts_of,
    run_training,
    texts_of,
    train,
    write_lines,
    write_teacher,
)

TIMING = {"hours", "rate", "minutes_left", "rank_rates"}


def said_by(folder: Path) -> Counter[str]:
    """How often each user's text begins a document."""
    return Counter(text for file in folder.glob("shard-*") for text in prompts_of(load_file(file)))


def rank_of(file: Path) -> str:
    with safe_open(file, framework="pt") as shard:
        return shard.metadata()["rank"]


@pytest.fixture
def teacher(target, tmp_path, monkeypatch) -> Path:
    """A folder with a model and 40 prompts, 2 of which are held out."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:38] + RESERVED[:2]])
    return tmp_path


@pytest.mark.parametrize("source", distill.Source)
def test_ranks_divide_the_prompts_and_others_go_on(teacher, source):
    """Two ranks, then three, then one: each prompt to train on is answered once before any is twice, and the folder
    holds what was asked for, whatever the ranks' clocks say. A rank's shards have numbers of its own, and prompts whose
    hash is its."""
    rows = [{"prompt": text, "response": "123456789"} for text in UNRESERVED[:38] + RESERVED[:2]]
    lines = write_lines(teacher / "mine.jsonl", rows)
    write = partial(write_teacher, teacher, lines, source=source, slots=2, shard_documents=2)
    for tokens, count in ((150, 2), (300, 3), (420, 1)):
        run = partial(write, tokens)
        for status, said in on_ranks(teacher / "logs", run, *[partial(a_day_ahead, run)] * (count - 1)):
            assert status == 0, said
        held = sum(len(text) for file in (teacher / "data").glob("shard-*") for text in texts_of(file))
        assert tokens <= held < tokens + 40 * count
        assert not list((teacher / "data").glob("running-*"))
    data, held_out = said_by(teacher / "data"), said_by(teacher / "held")
    assert data.keys() <= set(UNRESERVED)
    assert held_out.keys() <= set(RESERVED)
    if source is distill.Source.generate:
        assert max(data.values()) - min(data[text] for text in UNRESERVED[:38]) <= 1
    for file in (teacher / "data").glob("shard-*"):
        index, ranks = map(int, rank_of(file).split("/"))
        assert int(file.stem[-5:]) % ranks == index
        assert {prompts.rank_of(text, ranks) for text in prompts_of(load_file(file))} == {index}


def test_a_rank_that_is_killed_loses_its_open_shard_only(teacher, monkeypatch):
    """The others end; a run with another number of ranks keeps what there is and writes the rest."""
    step = conversations.Generator._step

    def killed(*arguments):
        own = {file.stem[:-6] for file in (teacher / "data").glob("*-*[13579].safetensors")}
        if os.environ.get("RANK") == "1" and own == {"running", "shard"}:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    write = partial(write_teacher, teacher, teacher / "mine.jsonl", 900, slots=4, max_tokens=30)
    with monkeypatch.context() as patch:
        patch.setattr(conversations.Generator, "_step", killed)
        patch.setattr(writing, "SHARD_S", 0.0)
        (first, _), (second, _) = on_ranks(teacher / "logs", write, write)
    assert (first, second) == (0, -signal.SIGKILL)
    before = [texts_of(file) for file in (teacher / "data").glob("*.safetensors")]
    assert list((teacher / "data").glob("running-*"))
    for status, said in on_ranks(teacher / "logs", write, write, write):
        assert status == 0, said
    after = [text for file in (teacher / "data").glob("shard-*") for text in texts_of(file)]
    assert all(text in after for texts in before for text in texts)
    assert sum(map(len, after)) >= 900
    assert not list((teacher / "data").glob("running-*"))


def test_what_an_earlier_file_of_answers_says_is_not_kept_twice(tmp_path):
    """Killed between the writing of the answers under way and that of their shard, a rank leaves two such files; after
    the shard, one whose answers it holds."""
    doc = shards.Document(conversations.deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4).bfloat16()] * 3)
    for name, rank in (("shard-00000", "0/2"), ("running-00000", "0/2"), ("running-00002", "0/2"),
                       ("running-00004", "0/2"), ("running-00003", "1/2")):  # fmt: skip
        shards.write_shard(tmp_path / f"{name}.safetensors", [doc], {"rank": rank})
    folder = shards.Shards(tmp_path, {"model": "tiny"})
    assert (folder.tokens, folder.number) == (9, 4)
    folder.begin()
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["shard-00000", "shard-00002", "shard-00003"]


def test_folders_of_several_machines_are_joined(teacher):
    """Ranks without a common disk know of each other's prompts, also where they are more later, or the machines change
    places; a seed of its own makes another folder."""
    one, other, more = (teacher / name for name in ("one", "other", "more"))
    write = partial(write_teacher, teacher, teacher / "mine.jsonl", slots=2)
    for tokens, folders in ((150, (one, other)), (250, (one, other, other)), (350, (other, one))):
        work = [partial(write, tokens, output=folder, held_out=folder / "held") for folder in folders]
        assert {status for status, _ in on_ranks(teacher / "logs", *work)} == {0}
    joined = said_by(one) + said_by(other)
    assert set(joined.values()) == {1}
    assert {rank_of(file) for file in one.glob("shard-*")} == {"0/2", "0/3", "1/2"}
    with torch.no_grad():
        write(150, output=more, held_out=more / "held", seed=7)
    training = TeacherData([one, other, more], 0, False).training
    assert len(training) == sum(len(list(folder.glob("shard-*"))) for folder in (one, other, more))


def test_folders_that_overlap_or_are_of_another_model_are_refused(teacher):
    rows = [{"prompt": text, "response": "123456789"} for text in UNRESERVED[:38] + RESERVED[:2]]
    lines = write_lines(teacher / "mine.jsonl", rows)
    for name, source, seed in (("one", "generate", 3), ("other", "generate", 3), ("read", "prefill", 3),
                               ("again", "prefill", 4)):  # fmt: skip
        with torch.no_grad():
            write_teacher(teacher, lines, 150, output=teacher / name, source=distill.Source(source), seed=seed)
    same = r"other holds prompts that .*one holds with the same seed 3: leave it out, or write it with another --seed$"
    for first, second, line in (("one", "other", same), ("read", "again", r"again holds .*read holds: leave it out$")):
        with pytest.raises(ValueError, match=line):
            TeacherData([teacher / first, teacher / second], 0, False)
    with pytest.raises(ValueError, match="a folder is given twice"):
        TeacherData([teacher / "one", teacher / "one"], 0, False)
    data = TeacherData([teacher / "one"], 0, False)
    data.require_model(teacher.name, distill.model_digest(teacher))
    with pytest.raises(ValueError, match=r"one holds teacher data of .*, not of big: leave it out of --data"):
        data.require_model("big", "another")


def test_parts_of_two_runs_are_refused(teacher):
    """Also where their shards have other numbers; those of one run are joined, under any seed that it went on with."""
    folders = [teacher / name for name in ("one", "other")]
    write = partial(write_teacher, teacher, teacher / "mine.jsonl", slots=2, shard_documents=64)
    for run, seed, tokens in (("first", 1, 150), ("first", 2, 250), ("second", 1, 150)):
        parts_of_run = [folder / run for folder in folders]
        work = [partial(write, tokens, output=part, held_out=part / "held", seed=seed) for part in parts_of_run]
        assert {status for status, _ in on_ranks(teacher / "logs", *work)} == {0}
    numbers = [
        {file.name for file in (folder / run).glob("shard-*")}
        for folder, run in zip(folders, ("first", "second"), strict=True)
    ]
    assert not numbers[0] & numbers[1]
    assert TeacherData([folder / "first" for folder in folders], 0, False).training
    line = r"other/second holds prompts that .*one/first holds with the same seed 1: leave it out, or"
    with pytest.raises(ValueError, match=line):
        TeacherData([folders[0] / "first", folders[1] / "second"], 0, False)
    shutil.copytree(folders[0] / "first", teacher / "copy")
    with pytest.raises(ValueError, match=r"copy holds prompts that .*one/first holds"):
        TeacherData([folders[0] / "first", teacher / "copy"], 0, False)


def test_parts_from_before_runs_had_names_are_joined_by_their_numbers(tmp_path):
    """Also where they went on since, under one name."""
    doc = shards.Document(conversations.deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4).bfloat16()] * 3)
    for place, run in (("one/shard-00000", {}), ("other/shard-00001", {}), ("one/shard-00002", {"run": "named"}),
                       ("other/shard-00003", {"run": "named"}), ("copy/shard-00001", {}),
                       ("new/shard-00005", {"run": "new"})):  # fmt: skip
        file = tmp_path / f"{place}.safetensors"
        file.parent.mkdir(exist_ok=True)
        shards.write_shard(file, [doc], {"seed": "3", "source": "generate", **run})
    one, other, copy, new = (tmp_path / name for name in ("one", "other", "copy", "new"))
    assert len(TeacherData([one, other], 0, False).training) == 4
    for second, of_first in ((copy, other), (new, one)):
        with pytest.raises(ValueError, match=f"{second} holds prompts that {of_first} holds with the same seed 3"):
            TeacherData([one, other, second], 0, False)


def test_a_prompt_that_another_rank_holds_out_is_not_trained_on(tmp_path):
    """Each rank's target writes prompts of its own, for both parts."""
    row = [torch.zeros(4, dtype=torch.bfloat16)] * 6
    docs = [shards.Document(conversations.deque(), 0.0, tokens=[5, prompt, 7, 8, 9, prompt], hidden=row, answer_start=3)
            for prompt in (11, 12, 13)]  # fmt: skip
    for name, kept, meta in (("data", docs, {}), ("held", docs[1:2], {"held_out": "true"})):
        (tmp_path / name).mkdir()
        shards.write_shard(tmp_path / name / "shard-00000.safetensors", kept, meta)
    teacher = TeacherData([tmp_path / "data", tmp_path / "held"], None, True)
    assert [answer[-1].item() for answer in teacher.answers()] == [11, 13]
    assert set(teacher.sample(3, 2).tokens.flatten().tolist()) == {5, 7, 8, 9, 11, 13}
    assert 12 in next(teacher.held_out(3, 2)).tokens


def test_ranks_that_differ_are_named(teacher):
    """In one line, before anything is written."""
    other = write_lines(teacher / "other.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    write = partial(write_teacher, teacher)
    for first, second, line in (
        (partial(write, teacher / "mine.jsonl"), partial(write, other), "rank 1: other prompts than rank 0: "),
        (partial(write, other), partial(write, other, seed=2), "rank 1: other options than rank 0: .*--seed 2"),
        (partial(write, other), partial(write, teacher / "none"), "rank 1: .*none"),
        (partial(write, teacher / "none"), partial(write, teacher / "none"), "^[^:]*none"),
    ):
        (status, said), (of_second, nothing) = on_ranks(teacher / "logs", first, second)
        assert (status, of_second, nothing) == (2, 2, "")
        assert re.search(line, said.splitlines()[-1]), said
        assert not (teacher / "data").exists()


def test_a_rank_of_another_model_or_version_is_named(teacher):
    """Also one whose folder holds another target's teacher data; clocks are not compared."""
    twin = teacher / "twin"
    shutil.copytree(teacher, twin, ignore=shutil.ignore_patterns("mine.jsonl", "twin"))
    (twin / "config.json").write_text((teacher / "config.json").read_text() + " ")
    with torch.no_grad():
        write_teacher(twin, teacher / "mine.jsonl", 60, output=teacher / "of twin", held_out=teacher / "held of twin")
    before = contents(teacher / "of twin")
    write = partial(write_teacher, teacher, teacher / "mine.jsonl")

    def of_another_version() -> None:
        distill.versions = lambda: "redraft 0.0.1, torch 2.0.0"
        write()

    for second, line in (
        (partial(write_teacher, twin, teacher / "mine.jsonl"), "rank 1: other model than rank 0: "),
        (of_another_version, "rank 1: other versions than rank 0: redraft 0.0.1, torch 2.0.0, not redraft "),
        (partial(write, output=teacher / "of twin"), r"rank 1: .*of twin/shard-00000\.safetensors is of "),
    ):
        (status, said), (of_second, nothing) = on_ranks(teacher / "logs", write, second)
        assert (status, of_second, nothing) == (2, 2, "")
        assert re.search(line, said.splitlines()[-1]), said
        assert not (teacher / "data").exists()
        assert contents(teacher / "of twin") == before


def test_a_rank_whose_bundle_is_of_another_model_is_named(teacher):
    """One of the same sizes, whose features none could tell from its model's."""
    twin, bundle = teacher / "twin", teacher / "bundle"
    shutil.copytree(teacher, twin, ignore=shutil.ignore_patterns("mine.jsonl", "twin"))
    weights = load_file(twin / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, twin / "model.safetensors")
    bundle.mkdir()
    built = built_from({"--model": str(twin)})
    manifest = Manifest(files={}, versions={}, cpu_features=[], target_fingerprint="", command="", built_from=built)
    (bundle / "manifest.json").write_text(manifest.model_dump_json())
    require_model(bundle, twin)
    write = partial(write_teacher, teacher, teacher / "mine.jsonl")
    (status, said), (of_second, nothing) = on_ranks(teacher / "logs", write, partial(write, bundle=bundle))
    assert (status, of_second, nothing) == (2, 2, "")
    assert said.splitlines()[-1].startswith(f"rank 1: {bundle} was built from another model than {teacher}: leave it")
    assert not (teacher / "data").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_error_without_words_is_one(tmp_path):
    def fails() -> None:
        with ranked("redraft", ""), this_rank().agreement() as facts:
            if this_rank().index:
                raise OSError
            facts["options"] = "none"

    (first, said), (second, _) = on_ranks(tmp_path, fails, fails)
    assert (first, second) == (1, 2)
    assert said.splitlines()[-1] == "ValueError: rank 1: OSError"


@pytest.mark.parametrize("main", [distill.main, train_command.main])
def test_each_rank_has_a_share_of_the_cores(tmp_path, monkeypatch, main):
    """And what it starts has all, although torchrun says 1."""

    def end(threads: int) -> None:
        sys.exit(threads if "OMP_NUM_THREADS" not in os.environ else 1)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(torch, "set_num_threads", end)
    assert [status for status, _ in on_ranks(tmp_path, main, main)] == [3, 3]
    assert ALONE.threads is None


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(typer.BadParameter, match="torchrun --nproc-per-node 3: expected at most 2, one for each GPU"):
        ranks._take_gpu(Ranks(0, 1, 3))


@pytest.mark.parametrize(("rank", "folder"), [(1, "data"), (0, "held")])
def test_a_full_disk_of_one_rank_is_named(teacher, monkeypatch, rank, folder):
    """And the folder's file. What the others wrote, and what it wrote before, stays."""
    save = files.save_file

    def full(tensors, path, metadata):
        if os.environ["RANK"] == str(rank) and path.parent.name == folder:
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", full)
    write = partial(write_teacher, teacher, teacher / "mine.jsonl", 300, slots=2)
    ended = on_ranks(teacher / "logs", write, write)
    assert [status for status, _ in ended] == [2 * (number == rank) for number in range(2)]
    line = rf"rank {rank}: \[Errno 28\] No space left on device: '{teacher / folder}/\w+-\d+.safetensors'; the same .*"
    assert re.fullmatch(line, ended[rank][1].splitlines()[-1])
    assert {rank_of(file) for file in (teacher / folder).iterdir()} <= {f"{1 - rank}/2"}


def log_of(folder: Path) -> list[dict]:
    rows = map(json.loads, (folder / "log.jsonl").open())
    return [{name: value for name, value in row.items() if name not in TIMING} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """To rounding: the order in which gradients are summed differs. Checkpoints have float32 and differ by 6e-8 at
    most; in the drafter's bfloat16 a lost or scaled gradient could be hidden."""
    for row, expected in itertools.zip_longest(log_of(one), log_of(other)):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"drafter"}:
            assert row[name] == pytest.approx(expected[name], abs=0.02, rel=0.002), name
    weights, others = (load_file(folder / "checkpoint.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_torchrun_trains_by_two_ranks(taught: Path, tmp_path: Path):
    """It would catch ranks that do not take their places from torchrun as it sets them. Slow, as three processes
    import torch."""
    program = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "-m", "redraft", "train"]
    settings = ["--set", "exit_dim=32", "--set", "num_blocks=1", "--window", "8", "--batch", "4", "--hot-tokens", "64"]
    files = ["--model", str(taught), "--data", str(taught / "data"), "--output", str(tmp_path / "run")]
    run = ["--positions", "400", "--every", "5", "--threads", "1", "--held-out-shards", "1"]
    done = subprocess.run([*program, *files, *settings, *run], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert lines[-1]["positions"] >= 400
    assert all(len(line["rank_rates"]) == 2 for line in lines)


def a_day_ahead(run: Callable[[], None]) -> None:
    """Run in a process of its own whose clocks differ."""
    now, monotonic = time.time, time.monotonic
    time.time, time.monotonic = lambda: now() + 86_400, lambda: monotonic() + 86_400
    run()


@pytest.mark.parametrize("drafter", ["recurrent", "eagle"])
def test_two_ranks_train_what_one_process_does(taught: Path, tmp_path: Path, drafter: str):
    """With the same windows a step, of which each rank has half, in one piece or in several that differ in size. The
    ranks' clocks differ."""
    train(taught, tmp_path / "one", drafter, 2400, batch=6)
    runs = {"pieces": {"accumulate": 4}, "ranks": {}, "both": {"accumulate": 2}}
    for name, more in runs.items():
        run = partial(run_training, taught, tmp_path / name, drafter, 2400, batch=6, **more)
        for status, said in on_ranks(tmp_path / "logs", run, *[partial(a_day_ahead, run)] * (name != "pieces")):
            assert status == 0, said
        assert_same_run(tmp_path / name, tmp_path / "one")
    assert len(json.loads((tmp_path / "ranks/log.jsonl").read_text().splitlines()[-1])["rank_rates"]) == 2


def test_a_run_goes_on_with_another_number_of_ranks(taught: Path, tmp_path: Path, monkeypatch):
    """One rank is killed: the other says so and ends. One process goes on, and then three ranks."""
    train(taught, tmp_path / "whole", "recurrent", 2400, batch=6)
    save, steps = training_run.save_checkpoint, itertools.count(1)

    def save_and_die(*arguments) -> None:
        save(*arguments)
        if next(steps) == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    run = partial(run_training, taught, tmp_path / "parts", "recurrent", 2400, batch=6)
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "CHECKPOINT_S", 0.0)
        patch.setattr(training_run, "save_checkpoint", save_and_die)
        (first, _), (second, said) = on_ranks(tmp_path / "logs", run, run)
        assert (first, second) == (-signal.SIGKILL, 1)
        assert said.splitlines()[-1] == (
            "redraft train: rank 1: another rank ended, the same command goes on from the last checkpoint"
        )
        ((status, said),) = on_ranks(tmp_path / "logs", run)
        assert status == -signal.SIGKILL
        assert "resumed at step 9" in said
    for status, said in on_ranks(tmp_path / "logs", run, run, run):
        assert status == 0, said
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_who_lost_a_rank_ends_without_its_threads(tmp_path: Path):
    """Threads of gloo may wait for the lost one. What was printed is not lost."""

    def lose() -> None:
        with ranked("redraft", "so it ends"):
            this_rank().gather(None)
            if this_rank().first:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=threading.Event().wait).start()
            sys.stdout = (tmp_path / "printed").open("w")
            print("a line")
            this_rank().gather(None)

    (first, _), (second, said) = on_ranks(tmp_path, lose, lose)
    assert (first, second) == (-signal.SIGKILL, 1)
    assert (tmp_path / "printed").read_text() == "a line\n"
    assert said.splitlines()[-1] == "redraft: rank 1: another rank ended, so it ends"


def test_a_checkpoint_that_cannot_be_read_is_named(taught: Path, tmp_path: Path, monkeypatch):
    """Other settings have a remedy of their own."""
    train(taught, tmp_path / "run", "recurrent", 200, batch=6)
    run = partial(run_training, taught, tmp_path / "run", "recurrent", batch=6)
    (status, said), (of_second, _) = on_ranks(tmp_path / "logs", *[partial(run, 300)] * 2)
    assert (status, of_second) == (2, 2)
    assert said.splitlines()[-1].endswith(f"for these give another --output and --start-from {tmp_path / 'run'}")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "checkpoint")

    monkeypatch.setattr(distillation.Checkpoint, "read", refuse)
    (status, said), _ = on_ranks(tmp_path / "logs", *[partial(run, 200)] * 2)
    assert status == 2
    assert said.splitlines()[-1] == "rank 0: [Errno 13] Permission denied: 'checkpoint'"


def test_a_full_disk_at_a_checkpoint_names_the_rank(taught: Path, tmp_path: Path, monkeypatch):
    """And leaves no half of a file."""

    def full(_, path: Path, *__):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    run = partial(run_training, taught, tmp_path / "run", "recurrent", 100)
    file = tmp_path / "run" / "drafter.safetensors"
    line = f"rank 0: [Errno 28] No space left on device: '{file}'; {train_command.GOES_ON}"
    (status, said), _ = on_ranks(tmp_path / "logs", run, run)
    assert status == 2
    assert said.splitlines()[-1] == line
    assert [file.name for file in (tmp_path / "run").iterdir()] == [train_command.BIGRAMS_FILE_NAME]

    def full_for_bigrams(file, _) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "run" / train_command.BIGRAMS_FILE_NAME).unlink()
    monkeypatch.setattr(train_command.np, "save", full_for_bigrams)
    (status, said), _ = on_ranks(tmp_path / "logs", run, run)
    assert status == 2
    file = tmp_path / "run" / train_command.BIGRAMS_FILE_NAME
    line = f"rank 0: [Errno 28] No space left on device: '{file}'; {train_command.GOES_ON}"
    assert said.splitlines()[-1] == line
    assert not list((tmp_path / "run").iterdir())


def test_ranks_that_train_on_other_data_are_named(taught: Path, tmp_path: Path):
    shutil.copytree(taught / "data", tmp_path / "data")
    (tmp_path / "data/shard-00002.safetensors").unlink()
    run = partial(run_training, taught, tmp_path / "new", "recurrent", 100)
    (status, said), (_, nothing) = on_ranks(tmp_path / "logs", run, partial(run, data=[tmp_path / "data"]))
    assert status == 2
    assert said.splitlines()[-1].startswith("rank 1: other teacher data than rank 0: 1 shards (")
    assert nothing == ""
    assert not (tmp_path / "new").exists()
    with pytest.raises(typer.BadParameter, match="--batch 2: expected a window at least for each of 3 pieces"):
        train(taught, tmp_path / "new", "recurrent", 100, batch=2, accumulate=3)


@pytest.fixture
def make_drafter(teacher, monkeypatch) -> Callable[..., None]:
    """`redraft drafter` without what takes long: rank 0 measures 700 tokens and 2900 positions a second, each further
    one half of that of the one before. Commands are written into commands-RANK."""

    def share(rate: float) -> float:
        return rate / 2 ** this_rank().index

    def note(words: list[str]) -> int:
        with (teacher / f"commands-{this_rank().index}").open("a") as file:
            print(*words, file=file)
        return 0

    def judge(*_) -> dict:
        note(["judge"])
        return {}

    monkeypatch.setattr(steps, "execute_apart", note)
    monkeypatch.setattr(steps.Steps, "built_bundle", lambda self, options: self.run("build") or {"--output": "bundle"})
    monkeypatch.setattr(plan, "measure_teacher_rate", lambda *_: (share(700.0), 20.0))
    monkeypatch.setattr(plan, "measure_training_rate", lambda *_: share(2900.0))
    monkeypatch.setattr(plan.TextCodec, "load", lambda _: SimpleNamespace(encode=list))
    monkeypatch.setattr(drafter, "teacher_engine", lambda *_: note(["engine"]) or teacher / "engine")
    monkeypatch.setattr(drafter, "cutoff_of_shards", lambda _: 0)
    monkeypatch.setattr(drafter, "fitting_prompts", lambda *_: [])
    monkeypatch.setattr(drafter, "measure_gains", judge)
    monkeypatch.setattr(drafter, "summary", lambda *_: [])
    run = {"model": teacher, "prompts": teacher / "mine.jsonl", "output": teacher / "drafter", "data": teacher / "data"}
    return lambda **more: drafter.main(**run | {"hours": 1.0, "precision": Precision.bf16} | more)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_ranks_make_a_drafter_by_one_plan(teacher, make_drafter, count):
    """It counts what all of them do in a second. The first rank goes on after the training, and speaks."""
    started = on_ranks(teacher / "logs", *[partial(make_drafter, kind="eagle")] * count)
    assert {status for status, _ in started} == {0}, started[0][1]
    assert {said for _, said in started[1:]} <= {""}
    first, *others = ((teacher / f"commands-{rank}").read_text().splitlines() for rank in range(count))
    made = plan.Plan.read(teacher / "drafter/plan.json")
    assert made
    assert made.teacher_rate == pytest.approx(1400 - 700 / 2 ** (count - 1), abs=0.06)
    assert f"--tokens {made.tokens} " in first[1]
    assert first[2].endswith(f"--positions {made.positions}" + (" --batch 5" if count == 5 else ""))
    assert [line.split()[0] for line in first] == ["engine", "distill", "train", "build", "build", "judge"]
    assert all(commands == first[:3] for commands in others)


@pytest.mark.parametrize("option", ["output", "data"])
def test_ranks_of_a_drafter_share_a_disk(teacher, make_drafter, option):
    """Or they are told before anything is built."""
    apart = partial(make_drafter, **{option: teacher / "apart"})
    (_, said), (status, nothing) = on_ranks(teacher / "logs", make_drafter, apart)
    assert (status, nothing) == (2, "")
    line = f"rank 1: {teacher / 'apart'} is not the folder of rank 0: expected a disk that all machines share"
    assert said.splitlines()[-1] == line
    assert not list(teacher.glob("commands-*"))
    assert not [file for name in ("drafter", "data", "apart") for file in teacher.glob(f"{name}/*")]


def test_a_drafter_goes_on_with_more_ranks(teacher, make_drafter):
    """Each needs a window of a batch, which cannot be raised once the drafter has been trained with it."""
    make = partial(make_drafter, kind="eagle")
    for count, batch in ((2, ""), (6, " --batch 6"), (5, " --batch 6")):
        for status, said in on_ranks(teacher / "logs", *[make] * count):
            assert status == 0, said
        for rank in range(count):
            trained = [line for line in (teacher / f"commands-{rank}").read_text().splitlines() if "train" in line]
            positions = plan.Plan.read(teacher / "drafter/plan.json").positions
            assert trained[-1].endswith(f"--positions {positions}{batch}")
    (teacher / "drafter/checkpoint.safetensors").touch()
    before = (teacher / "drafter/plan.json").read_bytes()
    for file in teacher.glob("commands-*"):
        file.unlink()
    started = on_ranks(teacher / "logs", *[make] * 7)
    assert {status for status, _ in started} == {2}
    assert started[0][1].splitlines()[-1] == (
        f"redraft drafter: {teacher / 'drafter'} holds a drafter that is trained with batches of 6 windows, one for "
        "each rank at least: start at most 6 ranks, or remove or rename it, and the same command trains one with 7 "
        "ranks; teacher data are kept"
    )
    assert {file.read_text() for file in teacher.glob("commands-*")} == {"engine\n"}
    assert (teacher / "drafter/plan.json").read_bytes() == before


@pytest.mark.parametrize("failing", ["teacher_engine", "measure_teacher_rate"])
@pytest.mark.parametrize("error", [ValueError, OSError, BundleError])
def test_what_fails_on_one_rank_of_a_drafter_is_said(teacher, make_drafter, monkeypatch, failing, error):
    module = drafter if failing == "teacher_engine" else plan
    works = getattr(module, failing)

    def fails(*arguments):
        if this_rank().index == 1:
            raise error("no such thing")
        return works(*arguments)

    monkeypatch.setattr(module, failing, fails)
    (first, said), (second, of_second) = on_ranks(teacher / "logs", make_drafter, make_drafter)
    assert (first, second) == (1, 2)
    assert of_second == "redraft drafter: rank 1: no such thing\n"
    assert said.splitlines()[-1] == "redraft drafter: rank 0: another rank ended, the same command goes on"
    assert not (teacher / "drafter/plan.json").exists()


def test_a_program_of_ranks_runs_another(tmp_path):
    """Which meets at the same address, while the ranks of the first are connected."""
    inner = (
        "from redraft.training.ranks import ranked, this_rank\n"
        "with ranked('inner', ''): print(*this_rank().gather(this_rank().index))"
    )

    def outer() -> None:
        with ranked("outer", ""):
            assert this_rank().gather(this_rank().index) == [0, 1]
            assert subprocess.check_output([sys.executable, "-c", inner]) == b"0 1\n"
            assert this_rank().gather(this_rank().index) == [0, 1]

    for status, said in on_ranks(tmp_path, outer, outer):
        assert status == 0, said
