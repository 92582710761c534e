"""Prompt files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from redraft.prompts import load_prompts, spread

SHIPPED = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"
KINDS = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def test_shipped_prompts_cover_every_kind():
    prompts = load_prompts(SHIPPED)
    assert len(prompts) >= 80
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == KINDS
    assert min(counts.values()) >= 10
    assert len({prompt.question_id for prompt in prompts}) == len(prompts)
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)
    assert {len(prompt.turns) for prompt in prompts} == {1, 2}


def test_prompt_formats(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"question_id": 81, "category": "qa", "turns": ["a", "b"], "reference": []}, {"prompt": "c"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = load_prompts(file)
    assert (first.question_id, first.category, first.turns) == ("81", "qa", ("a", "b"))
    assert (second.question_id, second.category, second.turns) == ("2", "all", ("c",))


def test_references_are_texts_by_turn(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": ["a"], "reference": ["x"]},
        {"turns": ["a", "b"], "reference": [["x", " ", "y"], ""]},
        {"turns": ["a"], "reference": None},
        {"turns": ["a"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [prompt.references for prompt in load_prompts(file)] == [(("x",),), (("x", "y"), ()), (), ()]


@pytest.mark.parametrize("reference", ["x", 0, {}, ["x", "y"], [1], [["x", 2]], [None]])
def test_wrong_references_are_named(tmp_path, reference):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"turns": ["a"], "reference": reference}))
    with pytest.raises(
        ValueError, match="line 1: expected 'reference' to have a text or a list of texts for each of 1"
    ):
        load_prompts(file)


@pytest.mark.parametrize("line", ["{", "[1]", '{"turns": []}', '{"turns": "text"}', '{"prompt": " "}', '{"other": 1}'])
def test_wrong_prompt_lines_are_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        load_prompts(file)


def test_empty_prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(file)


def test_spreading_over_a_sorted_file():
    prompts = load_prompts(SHIPPED)
    assert {prompt.category for prompt in spread(prompts, 8)} == KINDS
    assert len(set(spread(prompts, 30))) == 30
    assert spread(prompts, None) == spread(prompts, 500) == prompts


def test_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "c"}\n', encoding="utf-8-sig")
    assert [prompt.turns for prompt in load_prompts(file)] == [("c",)]
