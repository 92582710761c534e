"""Serving known answers from memory."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.replay import retrieval
from benchmarks.replay.answers import Answer, write

TEXT = [5, 9, 7, 3, 8, 2, 6, 4, 1, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


def answer(tokens: list[int], start: int) -> Answer:
    return Answer(torch.tensor(tokens), torch.zeros(len(tokens), 4), start)


@pytest.mark.parametrize(("shared", "accepted", "steps"), [(False, 0, 17 + 17), (True, 8 + 8, 17 + 2)])
def test_a_shared_memory_knows_the_answers_before(shared, accepted, steps):
    """The first of 18 tokens is the root. The second time, two trees of 8 nodes hold the other 17 but one."""
    served = [answer(TEXT, 2), answer(TEXT, 2)]
    summary = retrieval.serve(served, 8, [], shared)
    assert summary["acceptance_length"] == pytest.approx(1 + accepted / steps)


def test_a_request_alone_knows_its_own_text():
    summary = retrieval.serve([answer([*TEXT, *TEXT], 20)], 8, [], shared=False)
    assert summary["acceptance_length"] == pytest.approx(1 + (8 + 8 + 1) / 3)


def test_warm_up_is_read_and_not_counted():
    warm = retrieval.serve([answer(TEXT, 2)], 8, [answer(TEXT, 2)], shared=True)
    assert warm["acceptance_length"] == pytest.approx(1 + (8 + 8) / 2)
    assert warm["draft_us"] > 0
    assert warm["read_us"] > 0


def test_table(tmp_path, capsys):
    write(tmp_path / "answers", [answer(TEXT, 2), answer(TEXT, 5)])
    write(tmp_path / "others", [answer(TEXT, 2)])
    arguments = ["--answers", str(tmp_path / "answers"), "--budgets", "2", "8", "--output", str(tmp_path / "r.json")]
    retrieval.main([*arguments, "--warm-up", str(tmp_path / "others")])
    cells = json.loads((tmp_path / "r.json").read_text())["cells"]
    assert [row["budget"] for row in cells] == [2, 8] * 3
    lengths = [row["acceptance_length"] for row in cells]
    assert lengths[1] < lengths[3] < lengths[5]
    assert "and 20 tokens of others" in capsys.readouterr().out
