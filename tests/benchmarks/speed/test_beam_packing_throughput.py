"""The comparison of packed with unpacked beams: through the scheduler, and what makes it end with an error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.speed import beam_packing_throughput, method_batches
from compiler.methods import read_methods
from redraft.bundle.budget import BudgetTable
from redraft.decoding.construction import UNPACKED
from redraft.llm import LLM, Answer
from redraft.method import MethodPlan
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE, SequenceStats
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.conftest import ROOT
from tests.toy_engine import ToyEngine, toy_codec

LIMITS = Limits(slots=4, max_len=256, max_tree=16, prefill_chunk=32)
PROMPTS = ["hello world", "abcabcabc", "to be or not to be", "one", "two", "three"]
PLANS = {"unpacked_5": UNPACKED, "packed_5": "beam"}


class Engine(ToyEngine):
    drafters = property(lambda self: dict.fromkeys(PLANS, self))


def llm_of(plans: dict[str, str]) -> LLM:
    engine = Engine(width=5, length=3)
    made = {name: MethodPlan(kind, budget=BudgetTable.constant(15)) for name, kind in plans.items()}
    return LLM(Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), made, prefix_reuse=False))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The script over an LLM; gives what it wrote."""
    monkeypatch.setattr(method_batches, "load_prompts", lambda path: [Prompt("1", "all", (text,)) for text in PROMPTS])
    monkeypatch.setattr(method_batches, "ChatTokenizer", lambda bundle: type("T", (), {"chat": staticmethod(str)}))

    def run_with(llm: LLM) -> dict:
        monkeypatch.setattr(beam_packing_throughput, "load_llm", lambda parser, bundle: llm)
        output = tmp_path / "r.json"
        arguments = ["--num-prompts", "4", "--max-tokens", "20", "--batches", "1", "3", "--rounds", "1"]
        beam_packing_throughput.main(["--bundle", "b", *arguments, "--output", str(output)])
        return json.loads(output.read_text())

    return run_with


def test_both_accept_the_same_and_only_rows_differ(run):
    cells = {(row["method"], row["batch"]): row for row in run(llm_of(PLANS))["cells"]}
    assert set(cells) == {(method, batch) for method in (AUTO_REGRESSIVE, *PLANS) for batch in (1, 3)}
    for batch in (1, 3):
        packed, unpacked = (cells[method, batch] for method in ("packed_5", "unpacked_5"))
        assert packed["acceptance_length"] == unpacked["acceptance_length"] > 1.1
        assert unpacked["drafted_per_step"] > 1.2 * packed["drafted_per_step"]
        assert min(packed["tokens_per_s"], unpacked["tokens_per_s"]) > 0


def test_beams_that_accept_less_are_an_error(run):
    with pytest.raises(ArithmeticError, match=r"unpacked_5, prompt 0: .* steps that accept"):
        run(llm_of({"packed_5": "beam", "unpacked_5": "chain"}))


def test_a_bundle_without_the_other_method_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run(llm_of({"unpacked_5": UNPACKED}))
    assert "b has no method packed_5 to compare with" in capsys.readouterr().err


def test_other_tokens_than_auto_regressive_decoding_are_an_error():
    answer = Answer([1, 2], stats=SequenceStats(steps=1, accepted_by_depth=[1]))
    beam_packing_throughput.check("packed_5", [answer], [answer], [answer])
    with pytest.raises(ArithmeticError, match="packed_5, prompt 0: other tokens than auto-regressive decoding"):
        beam_packing_throughput.check("packed_5", [answer], [answer], [replace(answer, token_ids=[1, 3])])


def test_the_methods_verify_all_of_the_same_beams(monkeypatch):
    monkeypatch.chdir(ROOT)
    file = ROOT / "benchmarks" / "methods" / "beam_packing.toml"
    methods = {name: one.info() for name, one in read_methods(file).items()}
    for name, method in methods.items():
        kind, _, width = name.partition("_")
        assert (method.construction, method.beam_width) == ({"packed": "beam", "unpacked": UNPACKED}[kind], int(width))
        assert method.tree_budget == method.beam_width * method.beam_length
        pair = methods[beam_packing_throughput.pair_of(name)]
        assert pair == method.model_copy(update={"construction": "beam"})
