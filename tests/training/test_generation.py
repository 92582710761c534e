"""A generation: what it is trained on and judged by, and that the judge tells a better drafter from noise."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.learning.generations import Generation, Measure, generation_folder, last_generation
from redraft.learning.shard_file import SHARDS, add_shard, bfloat16_bits, prompt_hash, shard_bytes
from redraft.training.generation import JUDGED, TRAINED, count_answers, judge, remove_answers, set_apart
from redraft.training.teacher_data import TeacherData
from tests.training.teacher import generate, train


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


def names(folder: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in sorted(folder.glob(SHARDS))]


def test_the_newest_answers_are_judged_by_and_no_prompt_is_on_both_sides(target, tmp_path):
    """The fifth shard's prompts are the first one's again."""
    asked = serve(tmp_path / "learn", target, 5)
    assert asked[4] == asked[0]
    generation = generation_folder(tmp_path / "learn", 1)
    set_apart(tmp_path / "learn", generation)
    assert (names(generation / TRAINED), names(generation / JUDGED)) == ([0, 1, 2, 3], [4])
    data = TeacherData([generation / TRAINED, generation / JUDGED], None, prompts=False)
    assert data.evaluation == sorted((generation / JUDGED).iterdir())
    answers = [answer for file in data.training for answer in data._trained(file)[1]]
    assert len(answers) == 60, "without those of the first shard"
    assert len(list(data.held_out_answers(8, 3, most=15))) == 15


def test_what_was_set_apart_stays_when_the_served_answers_go(target, tmp_path):
    serve(tmp_path / "learn", target, 3)
    served = sorted((tmp_path / "learn").glob(SHARDS))
    os.utime(served[-1], (5, 5))
    generation = generation_folder(tmp_path / "learn", 1)
    set_apart(tmp_path / "learn", generation)
    [copy] = (generation / JUDGED).iterdir()
    assert copy.stat().st_mtime == 5, "it is removed when the served one is"
    for path in served:
        path.unlink()
    assert sum(map(count_answers, (generation / TRAINED).iterdir())) == 40
    (generation / "checkpoint.safetensors").touch()
    remove_answers(generation)
    assert list(generation.iterdir()) == []


def test_too_few_answers_are_said_and_nothing_is_made(target, tmp_path):
    serve(tmp_path / "learn", target, 2, answers=7)
    with pytest.raises(ValueError, match="holds 14 answers in 2 shards, too few"):
        set_apart(tmp_path / "learn", generation_folder(tmp_path / "learn", 1))
    assert last_generation(tmp_path / "learn") == 0


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
    generation = generation_folder(tmp_path / "learn", 1)
    set_apart(tmp_path / "learn", generation)
    measure = judge(target, drafters, generation / JUDGED, unroll=3)
    assert measure.is_better or kind == "eagle"
    assert measure.length > measure.length_before >= 1
    assert measure.answers == 20
    itself = judge(target, drafters[1:] * 2, generation / JUDGED, unroll=3)
    assert (itself.gain_low, itself.gain_high, itself.is_better) == (0, 0, False)


def test_generations_are_counted(tmp_path):
    for number in (1, 2, 10):
        generation_folder(tmp_path, number).mkdir(parents=True)
    (tmp_path / "generations" / ".11.partial").mkdir()
    assert last_generation(tmp_path) == 10
    measure = Measure(answers=3, length_before=1.5, length=1.75, gain_low=0.125, gain_high=0.5)
    made = Generation(number=10, began_from="d", positions=7, answers=5, measure=measure)
    made.write(generation_folder(tmp_path, 10))
    assert Generation.of(generation_folder(tmp_path, 10)) == made
