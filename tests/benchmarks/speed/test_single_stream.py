"""Single-stream and concurrent comparisons on the toy engine, and their figures."""

import json

import pytest

from benchmarks.command import execute
from benchmarks.load import comparison
from benchmarks.speed import single_stream
from redraft.bundle.method import MethodConfig
from redraft.decoding.retrieval import NGRAM_TRIE
from redraft.llm import LLM
from redraft.loadtest.workload import ChatTokenizer
from redraft.request import AUTO_REGRESSIVE, request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import TOY, ToyEngine, toy_codec

NGRAM_ALONE = MethodConfig(construction=None, ngram=True, tree_budget=8)


def llm(plans):
    engine = ToyEngine()
    limits = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
    return LLM(Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans, prefix_reuse=False))


def test_report_of_a_race(tokenizer_folder, tmp_path, capsys):
    dataset = tmp_path / "prompts.jsonl"
    rows = [{"category": kind, "turns": [text]} for kind, text in (("a", "hello"), ("a", "abab"), ("b", "to be"))]
    dataset.write_text("\n".join(map(json.dumps, rows)))
    race = single_stream.Race(dataset, None, 20, [0.0, 1.0], 0.9, [2], warm_up=1, repeats=2)
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
    both = llm({TOY: plan, "ngram": NGRAM_ALONE})
    methods = {comparison.AR: "auto_regressive", "speculative": None, "ngram": "ngram"}
    decoders = {name: comparison.LLMDecoder(both, method) for name, method in methods.items()}
    report = race.run(decoders, ChatTokenizer(tokenizer_folder))
    for table in single_stream.tables(report):
        table.show(single_stream.console)
    cold = report["single"]["0"]
    spec, ar = cold["contenders"]["speculative"], cold["contenders"]["auto-regressive"]
    assert spec["identical_answers"] == cold["prompts"] == 3
    assert cold["contenders"]["ngram"]["acceptance_length"] != spec["acceptance_length"]
    assert spec["acceptance_length"] > 1.2
    assert spec["rows_per_step"] == pytest.approx(9, abs=1.5)
    assert spec["drafting_share"] > 0
    assert ar["acceptance_length"] == 1
    assert ar["rows_per_step"] == 1
    assert ar["drafting_share"] == 0
    assert set(spec["categories"]) == {"a", "b"}
    (level,) = report["concurrent"]["1"]
    assert level["streams"] == 2
    assert level["contenders"]["speculative"]["speedup"] > 0
    for kind, value in (("speedup", spec["speedup"]), ("acceptance", spec["acceptance_length"])):
        low, high = spec[f"{kind}_interval"]
        assert low <= value <= high
    accepted, offered = spec["depth_counts"][0]
    assert spec["conditional_acceptance"][0] == accepted / spec["steps"]
    printed = capsys.readouterr().out
    assert f"{accepted}/{spec['steps']})" in printed
    assert f"{accepted}/{offered})" in printed


def test_what_cannot_be_compared_is_refused(tokenizer_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}')
    given = ["--bundle", str(tokenizer_folder), "--prompts", str(tmp_path / "prompts.jsonl")]
    plans = {TOY: MethodConfig(construction="best_first", tree_budget=8)}
    for offered, options, reason in (
        ({}, ["--method", "all"], "has no drafter"),
        (plans, ["--max-tokens", "300"], "300"),
    ):
        monkeypatch.setattr(single_stream, "load_llm", lambda *_, offered=offered: llm(offered))
        assert execute(single_stream.main, [*given, *options]) == 2
        assert reason in capsys.readouterr().err


def test_a_comparison_starts_from_what_the_warm_up_served():
    """Not from the same prompts' answers, of a repeat or of another temperature."""
    trie = llm({"trie": MethodConfig(construction=NGRAM_TRIE, tree_budget=8)})
    decoders = {comparison.AR: comparison.LLMDecoder(trie, AUTO_REGRESSIVE), "trie": comparison.LLMDecoder(trie)}
    asked, others = ([request(f"{kind} {i}", 30, temperature=0.0) for i in range(4)] for kind in ("to be", "not"))

    def steps(warm_up: list, repeats: int) -> int:
        contenders = comparison.compare(decoders, asked, warm_up, repeats, lambda: None)
        return sum(answer.stats.steps for answer in contenders["trie"].answers)

    assert steps(others, 1) == steps(others, 3) == steps(others, 1)
    assert steps(asked, 1) < steps(others, 1), "all of the warm-up is served"
