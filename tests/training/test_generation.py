"""A generation: what it is trained on and judged by, and that the judge tells a better drafter from noise."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.cli import learn
from redraft.learning import shard_file
from redraft.learning.generations import Generation, Measure, generation_folder, last_generation
from redraft.learning.shard_file import (
    SERVED,
    SHARDS,
    add_shard,
    bfloat16_bits,
    link_or_copy,
    prompt_hash,
    shard_bytes,
)
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.training import generation as generation_module
from redraft.training.generation import (
    BEGUN,
    CHECKPOINT,
    JUDGED,
    TRAINED,
    Order,
    count_answers,
    goes_on,
    judge,
    remove_answers,
    set_apart,
)
from redraft.training.teacher_data import TeacherData, prompt_hashes
from tests.training.teacher import generate, texts_of, train


def serve(folder: Path, target, shards: int, answers: int = 20, metadata=None, first: int = 10) -> list[list[int]]:
    """Store answers to prompts of one token, as a service does. Returns the prompts of each shard."""
    folder.mkdir(exist_ok=True)
    asked = []
    for shard in range(shards):
        prompts = [[first + (shard * answers + index) % 80] for index in range(answers)]
        docs = generate(target, answers, prompts)
        tokens = [np.array(doc.tokens[doc.answer_start :], np.int32) for doc in docs]
        features = [bfloat16_bits(torch.stack(doc.hidden[doc.answer_start :]).float().numpy()) for doc in docs]
        add_shard(
            folder,
            shard_bytes(
                tokens, features, [prompt_hash(doc.tokens[: doc.answer_start]) for doc in docs], metadata or {}
            ),
        )
        asked.append(sorted(doc.tokens[3] for doc in docs))
    return asked


def apart(learned: Path, said: list[str] | None = None, **order) -> Path:
    """The first generation of a folder, for a recurrent drafter."""
    generation = generation_folder(learned, 1)
    say = said.append if said is not None else pytest.fail
    set_apart(learned, generation, Order(DRAFTERS["recurrent"], **{"settings": ["7"]} | order), say)
    return generation


def answers_of(folder: Path) -> list[list[int]]:
    """The answers of a folder, in order."""
    return [text for file in sorted(folder.glob(SHARDS)) for text in texts_of(file)]


def names(folder: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in sorted(folder.glob(SHARDS))]


def test_the_newest_answers_are_judged_by_and_no_prompt_is_on_both_sides(target, tmp_path):
    """The fifth shard's prompts are the first one's again; its last 16 answers are set apart."""
    asked = serve(tmp_path / "learn", target, 5)
    assert asked[4] == asked[0]
    served = answers_of(tmp_path / "learn")
    generation = apart(tmp_path / "learn")
    assert (names(generation / TRAINED), names(generation / JUDGED)) == ([0, 1, 2, 3, 4], [4])
    assert answers_of(generation / TRAINED) + answers_of(generation / JUDGED) == served
    data = TeacherData([generation / TRAINED, generation / JUDGED], None, prompts=False)
    assert data.evaluation == sorted((generation / JUDGED).iterdir())
    answers = [answer for file in data.training for answer in data._trained(file)[1]]
    assert len(answers) == 68, "without those to the sixteen prompts"
    judged = list(data.held_out_answers(8, 3, most=15))
    assert len(judged) == len({prompt for prompt, _ in judged}) == 15


@pytest.mark.parametrize(("shares", "judged"), [((2, 130), 19), ((130, 2), 19), ((3,) * 30, 16), ((129,), 19)])
def test_a_share_of_the_answers_is_set_apart_whatever_the_shards_hold(target, tmp_path, shares, judged):
    for index, count in enumerate(shares):
        serve(tmp_path / "learn", target, 1, count, first=10 + 3 * index % 60)
    generation = apart(tmp_path / "learn")
    assert len(answers_of(generation / JUDGED)) == judged
    assert len(answers_of(generation / TRAINED)) == sum(shares) - judged


def test_what_was_set_apart_stays_when_the_served_answers_go(target, tmp_path):
    serve(tmp_path / "learn", target, 5)
    served = sorted((tmp_path / "learn").glob(SHARDS))
    os.utime(served[-1], (5, 5))
    generation = apart(tmp_path / "learn")
    for part in (TRAINED, JUDGED):
        assert (generation / part / served[-1].name).stat().st_mtime == 5, "it is removed when the served one is"
    for path in served:
        path.unlink()
    assert len(answers_of(generation / TRAINED)) == 84
    trained = count_answers(generation, Order(DRAFTERS["recurrent"], ["7"]))
    assert trained == 68, "without those to prompts that are judged by"
    (generation / CHECKPOINT).touch()
    remove_answers(generation)
    assert list(generation.iterdir()) == []


def test_shards_that_cannot_be_trained_on_are_left_out(target, tmp_path):
    learned, said = tmp_path / "learn", list[str]()
    serve(learned, target, 4, metadata={"target_fingerprint": "this"})
    serve(learned, target, 2, metadata={"target_fingerprint": "other"})
    add_shard(learned, b"none")
    add_shard(learned, shard_bytes([np.arange(5)], [np.ones((6, 16), np.uint16)], [1], {}))
    add_shard(learned, shard_bytes([np.arange(5)], [np.ones((4, 16), np.uint16)], [1, 2], {}))
    generation = apart(learned, said, fingerprint="this")
    assert {*names(generation / TRAINED), *names(generation / JUDGED)} == {0, 1, 2, 3}
    assert [text.partition(" is left out")[0] for text in said[:3]] == [
        f"shard-{number:08d}.safetensors" for number in (6, 7, 8)
    ]
    assert said[3].startswith("2 shards")


def test_one_prompt_that_is_asked_again_and_again_does_not_fill_what_is_judged(target, tmp_path):
    """Older answers are judged by too, to sixteen prompts."""
    serve(tmp_path / "learn", target, 5)
    for _ in range(30):
        serve(tmp_path / "learn", target, 1, 1)
    generation = apart(tmp_path / "learn")
    prompts = [prompt for file in (generation / JUDGED).iterdir() for prompt in prompt_hashes(file)]
    assert len(set(prompts)) == 16
    assert len(prompts) > 30


def test_a_generation_that_cannot_be_begun_leaves_nothing(target, tmp_path, monkeypatch):
    serve(tmp_path / "learn", target, 5)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(generation_module, "save_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        apart(tmp_path / "learn")
    assert not list((tmp_path / "learn" / "generations").iterdir())


@pytest.mark.parametrize(
    ("shards", "answers"),
    [(2, 7), (1, 20), (60, 1), (9, 9)],
    ids=["few to judge by", "few to train on", "one prompt", "nine prompts"],
)
def test_too_few_answers_are_said_and_nothing_is_made(target, tmp_path, shards, answers):
    for _ in range(shards):
        serve(tmp_path / "learn", target, 1, answers)
    with pytest.raises(ValueError, match=r"holds \d+ answers in \d+ shards, too few"):
        apart(tmp_path / "learn")
    assert last_generation(tmp_path / "learn") == 0
    assert not list((tmp_path / "learn" / "generations").iterdir())


def test_a_generation_goes_on_only_with_what_it_was_begun_with(target, tmp_path):
    learned, order = tmp_path / "learn", Order(DRAFTERS["recurrent"], ["7"])
    serve(learned, target, 5)
    generation = apart(learned)
    assert not goes_on(generation, order), "nothing is trained yet"
    (generation / CHECKPOINT).touch()
    assert goes_on(generation, order)
    assert not goes_on(generation, Order(DRAFTERS["recurrent"], ["8"]))
    (tmp_path / "mix").mkdir()
    mixed = Order(DRAFTERS["recurrent"], ["7"], mix=[tmp_path / "mix"])
    assert goes_on(generation, mixed), "with nothing in it"
    add_shard(tmp_path / "mix", b"one more")
    assert not goes_on(generation, mixed), "other data are mixed in"
    next((generation / TRAINED).iterdir()).unlink()
    assert not goes_on(generation, order), "an answer was removed"
    apart(learned)
    assert not (generation / CHECKPOINT).exists()
    assert len(answers_of(generation / TRAINED)) == 84
    (generation / BEGUN).write_text("{")
    assert not goes_on(generation, order)


def test_answers_of_another_target_are_refused(target, tmp_path):
    serve(tmp_path / "learn", target, 1, metadata={"target_fingerprint": "other"})
    data = TeacherData([tmp_path / "learn"], 0, prompts=False)
    data.require_target("other")
    with pytest.raises(ValueError, match="holds answers of another target"):
        data.require_target("this")


@pytest.mark.parametrize("kind", ["recurrent", "hidden_state", "eagle", "medusa"])
def test_every_kind_that_reads_hidden_states_is_trained_on_served_answers_and_judged(target, taught, tmp_path, kind):
    """One that was trained beats one that was hardly trained; itself it does not beat. Eagle's first weights are so
    good here that training them is within noise."""
    serve(tmp_path / "learn", target, 4)
    drafters = [tmp_path / "first", tmp_path / "second"]
    for drafter, positions in zip(drafters, (16, 6000), strict=True):
        train(
            taught,
            drafter,
            kind,
            positions,
            peak_rate=1e-6 if positions == 16 else None,
            data=[tmp_path / "learn"],
            every=1000,
        )
    generation = apart(tmp_path / "learn")
    measure = judge(target, drafters, generation / JUDGED, unroll=3)
    assert measure.is_better or kind == "eagle"
    assert measure.length > measure.length_before >= 1
    assert measure.answers == 16
    itself = judge(target, drafters[1:] * 2, generation / JUDGED, unroll=3)
    assert (itself.gain_low, itself.gain_high, itself.is_better) == (0, 0, False)


def test_answers_to_one_prompt_are_one_sample(monkeypatch):
    """However often it is asked: sixteen that got better outweigh one that got worse, and was asked 240 times."""

    def accepted(_, drafter, *__):
        better, worse = {"before": (4, 4), "after": (6, 2)}[drafter]
        answers = [(prompt, better) for prompt in range(16)] + [(99, worse)] * 240
        return [prompt for prompt, _ in answers], np.array([[4, tokens] for _, tokens in answers], np.float64)

    monkeypatch.setattr(generation_module, "_accepted", accepted)
    measure = judge(None, ["before", "after"], None)
    assert (measure.answers, measure.length_before, measure.length) == (256, 2.0, round(1 + (16 * 6 + 2) / (17 * 4), 4))
    assert 0 < measure.gain_low < measure.length - 2 < measure.gain_high


@pytest.mark.parametrize("wrong", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_links_holds_copies(target, tmp_path, monkeypatch, wrong):
    """A name that is taken stays what it was."""

    def refuse(*_):
        raise OSError(wrong, os.strerror(wrong))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    serve(tmp_path / "learn", target, 5)
    assert names(tmp_path / "learn") == [0, 1, 2, 3, 4]
    generation = apart(tmp_path / "learn")
    assert answers_of(generation / TRAINED) + answers_of(generation / JUDGED) == answers_of(tmp_path / "learn")
    first, second, *_ = sorted((tmp_path / "learn").glob(SHARDS))
    os.utime(first, (5, 5))
    with pytest.raises(FileExistsError):
        link_or_copy(first, second)
    link_or_copy(first, copy := tmp_path / "copy")
    assert (copy.stat().st_mtime, copy.stat().st_mode & 0o777, copy.read_bytes()) == (5, 0o600, first.read_bytes())
    monkeypatch.setattr(shard_file.shutil, "copyfileobj", refuse)
    with pytest.raises(OSError, match=os.strerror(wrong)):
        link_or_copy(first, tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_generations_are_counted(tmp_path):
    for number in (1, 2, 10):
        generation_folder(tmp_path, number).mkdir(parents=True)
    (tmp_path / "generations" / ".11.partial").mkdir()
    assert last_generation(tmp_path) == 10
    measure = Measure(answers=3, length_before=1.5, length=1.75, gain_low=0.125, gain_high=0.5)
    made = Generation(number=10, began_from="d", positions=7, answers=5, measure=measure)
    made.write(generation_folder(tmp_path, 10))
    assert Generation.of(generation_folder(tmp_path, 10)) == made


def test_learn_trains_judges_and_keeps_one_generation_after_another(target, taught, tmp_path, monkeypatch):
    """With the real training, in a process of its own."""
    monkeypatch.setattr(learn.os, "sched_setscheduler", lambda *_: None)
    drafter, learned = tmp_path / "drafter", tmp_path / "learn"
    train(taught, drafter, "recurrent", 16)
    serve(learned, target, 5, metadata={"source": SERVED})
    for number in (1, 2):
        learn.main(learned, always=True, model=taught, drafter=drafter, positions=600, threads=1)
        folder = generation_folder(learned, number)
        made = Generation.of(folder)
        assert made
        assert made.measure
        assert (made.answers, made.measure.answers) == (68, 16)
        assert made.model == learn.model_digest(taught)
        assert not {path.name for path in folder.iterdir()} & {TRAINED, JUDGED, BEGUN, CHECKPOINT}
        assert (folder / "bigrams.npy").read_bytes() == (drafter / "bigrams.npy").read_bytes()
