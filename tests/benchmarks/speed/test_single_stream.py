"""Single-stream and concurrent comparisons on the toy engine, and their figures."""

import json
import sys
from contextlib import closing

import pytest

from benchmarks.command import execute
from benchmarks.load import comparison
from benchmarks.load.llama_cpp import LlamaCpp, LlamaDecoder
from benchmarks.speed import single_stream
from redraft.bundle.method import MethodConfig
from redraft.llm import LLM
from redraft.loadtest.workload import ChatTokenizer
from redraft.request import request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import TOY, ToyEngine, toy_codec

FAKE_LLAMA = """
import numpy
__version__ = "0.0.1"
class Llama:
    def __init__(self, model, draft_model, **options): self.lookup = draft_model
    def reset(self): pass
    def set_seed(self, seed): self.seed = seed
    def generate(self, prompt, **options):
        yield from range(3 + self.seed, 100) if options["temp"] else range(3, 100)
    def eval(self, prompt):
        self.scores = numpy.float32([prompt, prompt, prompt]).T
"""


NGRAM_ALONE = MethodConfig(construction=None, ngram=True, tree_budget=8)


def llm(plans):
    engine = ToyEngine()
    limits = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
    return LLM(Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans, prefix_reuse=False))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package llama_cpp for child processes."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(FAKE_LLAMA)
    (tmp_path / "llama_cpp" / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = dict")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_report_of_a_race(tokenizer_folder, tmp_path, capsys, package):
    dataset = tmp_path / "prompts.jsonl"
    rows = [{"category": kind, "turns": [text]} for kind, text in (("a", "hello"), ("a", "abab"), ("b", "to be"))]
    dataset.write_text("\n".join(map(json.dumps, rows)))
    race = single_stream.Race(dataset, None, 20, [0.0, 1.0], 0.9, [2], repeats=2)
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
    both = llm({TOY: plan, "ngram": NGRAM_ALONE})
    methods = {comparison.AR: "auto_regressive", "speculative": None, "ngram": "ngram"}
    decoders = {name: comparison.LLMDecoder(both, method) for name, method in methods.items()}
    process = LlamaCpp(sys.executable, tmp_path / "model.gguf", 256)
    peers = {"llama.cpp model": LlamaDecoder(process, both.runtime)}
    report = race.run(decoders, ChatTokenizer(tokenizer_folder), peers)
    process.close()
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
    theirs = cold["contenders"]["llama.cpp model"]
    assert theirs["tokens"] == 60
    assert "steps" not in theirs
    assert cold["fastest_peer"] == "llama.cpp model"
    assert spec["over_peer"] == pytest.approx(spec["tokens_per_s"] / theirs["tokens_per_s"])
    (level,) = report["concurrent"]["1"]
    assert (level["streams"], level["requests"]) == (2, 4)
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
        (plans, ["--llama-model", "model.gguf"], "--llama-cpp and --llama-model"),
        (plans, ["--llama-cpp", sys.executable, "--llama-model", "no.gguf"], "llama.cpp with no.gguf"),
        (plans, ["--llama-cpp", "no/python", "--llama-model", "no.gguf"], "no/python"),
    ):
        monkeypatch.setattr(single_stream, "load_llm", lambda *_, offered=offered: llm(offered))
        assert execute(single_stream.main, [*given, *options]) == 2
        assert reason in capsys.readouterr().err


def test_each_of_the_peers_answers_ends_at_an_end_token_or_its_length(tmp_path, package):
    process = LlamaCpp(sys.executable, tmp_path / "model.gguf", 256, lookup=3)
    asked = [request("to be", 5), request("to be", 5, temperature=1.0, seed=90), request("to be", 5, end_id=5)]
    answers, clock = LlamaDecoder(process, llm({TOY: NGRAM_ALONE}).runtime).run(asked)
    process.close()
    assert process.version == "0.0.1"
    assert [answer.token_ids for answer in answers] == [[3, 4, 5, 6, 7], [93, 94, 95, 96, 97], [3, 4]]
    assert clock.wall_s == sum(answer.seconds for answer in answers)


def test_the_peers_logits(tmp_path, package):
    with closing(LlamaCpp(sys.executable, tmp_path / "model.gguf", 256, all_logits=True)) as process:
        assert process.logits([3, 1, 2]).tolist() == [[3, 3, 3], [1, 1, 1], [2, 2, 2]]
