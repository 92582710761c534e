"""What a comparison measures: the clock, rounds of methods, precisions and step times, on toy and tiny engines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.command import execute
from benchmarks.speed import method_batches, step_times
from benchmarks.speed.acceptance import conditional_acceptance, depth_counts
from benchmarks.speed.inprocess import teacher_force, timed
from benchmarks.speed.precision import Difference
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.config import LimitsInfo
from redraft.bundle.method import MethodConfig
from redraft.llm import LLM
from redraft.request import AUTO_REGRESSIVE, SequenceStats, request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.engines.tiny import METHOD, tiny_bundle, tiny_target
from tests.toy_engine import TOY, ToyEngine, toy_codec

TEXTS = ["hello world", "abcabcabc", "to be or not to be", "one", "two", "three"]


@pytest.fixture
def llm():
    engine, budget = ToyEngine(width=4, length=3), BudgetTable.constant(8)
    plans = {
        TOY: MethodConfig(construction="best_first", budget=budget),
        "ngrams": MethodConfig(construction=None, ngram=True, budget=budget),
    }
    limits = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
    return LLM(Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans, prefix_reuse=False))


def asked(*texts):
    return [request(text, 30, temperature=0.0) for text in texts]


def test_clock_splits_the_time(llm):
    _, clock = timed(llm, asked("hello"))
    assert 0 < clock.target_s + clock.draft_s < clock.step_s < clock.wall_s


def test_teacher_forcing_gives_the_logits_of_generation(llm):
    generation = request("a" * 40, 40, temperature=0.0, end_id=-1)
    prompt = llm.runtime.sequence(0, generation).prompt.tolist()
    answer = llm.run([generation])[0].token_ids
    chunks = [logits for logits, _ in teacher_force(llm, [*prompt, *answer[:-1]], len(prompt) - 1)]
    assert len(chunks) > 1
    assert np.concatenate(chunks).argmax(axis=1).tolist() == answer


def test_conditional_acceptance_is_accepted_over_accepted_at_the_depth_before():
    first = SequenceStats(steps=8, offered_by_depth=[8, 4, 3], accepted_by_depth=[4, 3, 0])
    second = SequenceStats(steps=2, offered_by_depth=[2], accepted_by_depth=[1])
    assert depth_counts([first, second, SequenceStats()]) == [(5, 10), (3, 4), (0, 3)]
    assert conditional_acceptance(10, [5, 3, 0]) == [(5, 10), (3, 5), (0, 3)]


@pytest.fixture
def batches(llm, tmp_path, monkeypatch, tokenizer_folder):
    rows = [{"turns": [text]} for text in TEXTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(method_batches, "load_llm", lambda _: llm)
    files = ["--bundle", tokenizer_folder, "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "r.json"]
    return lambda *options: execute(method_batches.main, [*files, *options])


def test_every_method_at_every_batch_size(batches, tmp_path, capsys):
    sizes = "--num-prompts 4 --max-tokens 20 --concurrency 1 3 --rounds 1"
    assert batches(*sizes.split(), "--best-of", TOY) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    cells = {(row["method"], row["batch"]): row for row in report["cells"]}
    assert set(cells) == {(method, batch) for method in (AUTO_REGRESSIVE, TOY, "ngrams") for batch in (1, 3)}
    assert report["prompts"] == 4
    assert cells[TOY, 1]["acceptance_length"] > 1.2 > cells[AUTO_REGRESSIVE, 1]["acceptance_length"]
    assert f"{TOY} against the best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method fast", "the bundle has no method fast"),
        ("--concurrency 9", "--concurrency 9: the bundle has 4 slots"),
        ("--max-tokens 250 --num-prompts 5 --concurrency 2", "250"),
    ],
)
def test_refusals(batches, capsys, options, message):
    assert batches(*options.split()) == 2
    assert message in capsys.readouterr().err


def test_divergence_by_hand():
    """KL((3/4, 1/4) | (1/2, 1/2)) = 3/4 ln 3/2 + 1/4 ln 1/2; the second position agrees."""
    difference = Difference("x", 1.0)
    reference = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
    difference.add(reference, torch.tensor([[0.49999, 0.50001], [0.1, 0.9]]).log())
    assert (difference.positions, difference.same) == (2, 1)
    assert difference.kl == pytest.approx(0.13081, abs=1e-4)


def test_steps_and_drafts_of_a_bundle_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "CONTEXT", 32)
    limits = LimitsInfo(slots=3, max_len=60, max_tree=8, prefill_chunk=16)
    bundle = tiny_bundle(tmp_path, tiny_target(), limits=limits)
    output = tmp_path / "times.json"
    assert execute(step_times.main, [bundle.path, "--output", output, "--repeats", "1", "--threads", "1"]) == 0
    times = json.loads(output.read_text())["rows"]
    assert {entry["method"] for entry in times} == {None, METHOD}
    assert [entry["sequences"] for entry in times if not entry["rows"]] == [1, 2]
