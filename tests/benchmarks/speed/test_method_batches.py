"""Methods at batch sizes: what a round measures, what it must not remember, and the table made of rounds."""

from __future__ import annotations

import json

import pytest

from benchmarks.speed import method_batches
from redraft.bundle.budget import BudgetTable
from redraft.llm import LLM
from redraft.method import MethodPlan
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import TOY, ToyEngine, toy_codec

LIMITS = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
PROMPTS = ["hello world", "abcabcabc", "to be or not to be", "one", "two", "three"]
OPTIONS = {"max_tokens": 30, "temperature": 0.0}


@pytest.fixture
def llm():
    return made()


def made(drafts: bool = True) -> LLM:
    engine, budget = ToyEngine(width=4, length=3), BudgetTable.constant(8)
    plans = {TOY: MethodPlan("best_first", budget=budget), "served": MethodPlan("ngram_trie", budget=budget)}
    given = plans if drafts else {}
    return LLM(Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), given, prefix_reuse=False))


def round_of(*given):
    return method_batches.throughput(*method_batches.answer_all(*given))


def test_a_round_remembers_the_warm_up_alone(llm):
    """Answers of the round before would be drafted whole."""
    first, second = (round_of(llm, "served", PROMPTS, ["x"], 1, OPTIONS) for _ in range(2))
    assert second["acceptance_length"] == first["acceptance_length"]
    told = round_of(llm, "served", PROMPTS[:1], PROMPTS[:1], 1, OPTIONS)
    untold = round_of(llm, "served", PROMPTS[:1], ["x"], 1, OPTIONS)
    assert told["acceptance_length"] > untold["acceptance_length"] + 1


def test_a_round_measures_its_own_method(llm):
    plain = round_of(llm, AUTO_REGRESSIVE, PROMPTS, ["x"], 3, OPTIONS)
    drafted = round_of(llm, TOY, PROMPTS, ["x"], 3, OPTIONS)
    assert (plain["acceptance_length"], plain["drafted_per_step"], plain["drafting_share"]) == (1, 0, 0)
    assert drafted["acceptance_length"] > 1.2
    assert drafted["drafting_share"] > 0
    assert drafted["tokens_per_s"] > 0


@pytest.mark.parametrize("own", [False, True], ids=["one engine", "auto-regressive decoding has its own"])
def test_every_method_at_every_batch_size(own, llm, tmp_path, monkeypatch, capsys):
    plain, closed = made(drafts=False) if own else llm, []
    for one in {llm, plain}:
        monkeypatch.setattr(one.runtime.engine, "close", lambda one=one: closed.append(one))
    asked = {one: [] for one in (llm, plain)}
    for one, rounds in asked.items():
        run = one.run
        monkeypatch.setattr(
            one, "run", lambda given, n, run=run, to=rounds: to.append(given[0].method) or run(given, n)
        )
    bundles = {"b": llm, "ar": plain}
    monkeypatch.setattr(method_batches, "load_llm", lambda parser, bundle: bundles[str(bundle)])
    monkeypatch.setattr(method_batches, "load_prompts", lambda path: [Prompt("1", "all", (text,)) for text in PROMPTS])
    monkeypatch.setattr(method_batches, "ChatTokenizer", lambda bundle: type("T", (), {"chat": staticmethod(str)}))
    output = tmp_path / "r.json"
    arguments = ["--bundle", "b", "--num-prompts", "4", "--max-tokens", "20", "--batches", "1", "3", "--rounds", "1"]
    arguments += ["--auto-regressive", "ar"] if own else []
    method_batches.main([*arguments, "--best-of", TOY, "--output", str(output)])
    written = json.loads(output.read_text())
    cells = {(row["method"], row["batch"]): row for row in written["cells"]}
    assert set(cells) == {(method, batch) for method in (AUTO_REGRESSIVE, TOY, "served") for batch in (1, 3)}
    assert (written["prompts"], written["warm_up"]) == (4, 2)
    if own:
        assert (set(asked[plain]), set(asked[llm])) == ({AUTO_REGRESSIVE}, {TOY, "served"})
    assert sorted(map(id, closed)) == sorted(map(id, {llm, plain}))
    printed = capsys.readouterr().out
    behind = cells[TOY, 3]["tokens_per_s"] / max(row["tokens_per_s"] for key, row in cells.items() if key[1] == 3) - 1
    assert f"{TOY} against the best" in printed
    assert f"{behind:+.1%}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fast"], "the bundle has no method fast; it has auto_regressive, "),
        (["--batches", "9"], "--batches 9: the bundle has 4 slots"),
        (["--max-tokens", "250", "--num-prompts", "5", "--batches", "2"], "250"),
        (["--num-prompts", "6", "--batches", "2"], "--num-prompts 6: expected fewer than the file's"),
    ],
)
def test_refusals(llm, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(method_batches, "load_llm", lambda parser, bundle: llm)
    monkeypatch.setattr(method_batches, "load_prompts", lambda path: [Prompt("1", "all", (text,)) for text in PROMPTS])
    monkeypatch.setattr(method_batches, "ChatTokenizer", lambda bundle: type("T", (), {"chat": staticmethod(str)}))
    with pytest.raises(SystemExit):
        method_batches.main(["--bundle", "b", *arguments])
    assert message in capsys.readouterr().err
