"""Recorded texts replay what a live run does; mixes are served alike in every way of decoding."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.budgets import mixes
from benchmarks.budgets.recorded import NODES, Replay, Text, record
from benchmarks.budgets.simulation import Run, cut
from benchmarks.command import PROMPTS_FILE, execute
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, TimeTable
from redraft.bundle.method import MethodConfig
from redraft.llm import LLM
from redraft.request import request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import TOY, ToyEngine, toy_codec

LIMITS = Limits(slots=16, max_len=512, max_tree=32, prefill_chunk=32)


@pytest.fixture
def runtime():
    engine = ToyEngine(width=4, length=3, slots=LIMITS.slots, max_len=LIMITS.max_len)
    table = TimeTable(sequences=LIMITS.slots, rows=[1, 1000], seconds=[1.0, 1.0], padded=False)
    return Runtime(
        engine,
        toy_codec(),
        LIMITS,
        engine.vocab_size,
        frozenset({0}),
        {TOY: MethodConfig(construction="best_first", tree_budget=NODES)},
        prefix_reuse=False,
        budgets=BudgetController(Estimates(costs=StepCosts(tables=[table]))),
    )


def asked(temperature):
    return [request(text, 40, temperature=temperature, seed=5) for text in ("hello", "abcabc", "to be")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [1, 4, NODES])
def test_a_replay_takes_the_steps_of_a_live_run(runtime, nodes, temperature):
    """It would catch nodes that are ranked or followed wrongly, and trees that are recorded for another token."""
    texts = record(runtime, asked(temperature))
    mixes.serve_by(runtime, None, nodes)
    live = LLM(runtime).run(asked(temperature))
    assert sum(answer.stats.accepted for answer in live) > nodes
    for text, answer in zip(texts, live, strict=True):
        replay, accepted = Replay([[text]]), []
        while (drawn := replay.draw(0.0, np.random.default_rng(0))) is not None:
            counts = cut(drawn, [nodes])[1]
            replay.accept(counts)
            accepted.append(int(counts[0]))
        # What a replay accepts beyond the end counts for nothing.
        assert len(accepted) <= answer.stats.steps <= len(accepted) + 1
        assert abs(sum(accepted) - answer.stats.accepted) <= 1


def test_texts_survive_their_file(runtime, tmp_path):
    texts = {"greedy": record(runtime, asked(0.0)), "empty": [Text(1.0, ((),))]}
    mixes.write_texts(tmp_path / "texts.json", texts)
    read = mixes.read_texts(tmp_path / "texts.json")
    assert read.keys() == texts.keys()
    for before, after in zip(texts["greedy"] + texts["empty"], read["greedy"] + read["empty"], strict=True):
        assert after.temperature == before.temperature
        for tree, again in zip(before.trees, after.trees, strict=True):
            assert [node.followed for node in tree] == [node.followed for node in again]
            scores = np.array([[a.score, b.score] for a, b in zip(tree, again, strict=True) if a.score > -6]).T
            assert not scores.size or np.abs(scores[0] - scores[1]).max() <= 0.125


def test_turns_are_served_together_and_one_after_the_other():
    short, long = (Text(0.0, ((),) * count) for count in (1, 3))
    replay, streams = Replay([[short], [short, long], []]), []
    while (drawn := replay.draw(0.0, np.random.default_rng(0))) is not None:
        streams.append(len(drawn.scores))
        replay.accept(np.zeros(streams[-1], int))
    assert streams == [1, 2, 1, 1]


def test_plain_decoding_is_timed_for_the_same_tokens():
    plain = mixes.Decoding(seconds=[1.0, 1.0, 2.0, 2.0], tokens=[1, 1, 1, 1], turn_ends=[2, 4])
    decoding = mixes.Decoding(seconds=[1.0, 1.0, 1.0], tokens=[2, 1, 1], turn_ends=[1, 3])
    assert decoding.beside(plain).plain.tolist() == [2.0, 2.0, 2.0]
    assert Run(np.ones(3), np.ones(3)).worst_window is None


def test_a_report_has_both_regrets(runtime, tokenizer_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixes, "load_llm", lambda bundle: LLM(runtime))
    short = {"chats": asked(0.0), "sampled": asked(1.0), "edits": asked(0.0), "random": asked(1.5)}
    monkeypatch.setattr(mixes, "requests_of", lambda *_: short)
    report = tmp_path / "report.json"
    arguments = ["--bundle", tokenizer_folder, "--turns", 2, "--fixed", 4]
    assert execute(mixes.main, [*arguments, "--output", report]) == 0
    figures = json.loads(report.read_text())["mixes"]
    assert list(figures) == ["chats, greedy", "chats, temperature 1", "code edits", "random words", "ramp"]
    for parts in figures.values():
        assert parts["live"]["identical"]
        assert {"speed_up", "worst_window", "regret"} <= parts["live"].keys() & parts["simulated"].keys()
        assert parts["live"]["control"].keys() == {"speed_up", "interval", "worst_window"}
    assert "regret" in capsys.readouterr().out


def test_requests_are_the_same_each_time(tokenizer_folder):
    first, again = (mixes.requests_of(tokenizer_folder, PROMPTS_FILE, 3, 8) for _ in range(2))
    assert first == again
    assert {kind: {len(first[kind]), *(r.sampling.temperature for r in first[kind])} for kind in first} == {
        "chats": {3, 0.0},
        "sampled": {3, 1.0},
        "edits": {3, 0.0},
        "random": {3, 1.5},
    }


def test_a_mix_that_is_too_short_is_refused(runtime, tokenizer_folder, monkeypatch, capsys):
    monkeypatch.setattr(mixes, "load_llm", lambda bundle: LLM(runtime))
    arguments = ["--bundle", tokenizer_folder, "--requests", 2, "--turns", 1, "--max-tokens", 9, "--fixed", 4]
    assert execute(mixes.main, arguments) == 2
    assert "more --turns" in capsys.readouterr().err


def test_a_bundle_without_drafts_is_refused(runtime, tokenizer_folder, monkeypatch, capsys):
    runtime.budgets = None
    monkeypatch.setattr(mixes, "load_llm", lambda bundle: LLM(runtime))
    assert execute(mixes.main, ["--bundle", tokenizer_folder]) == 2
    assert "drafts nothing" in capsys.readouterr().err
