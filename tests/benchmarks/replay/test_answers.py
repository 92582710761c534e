"""The target's own answers with their hidden states, on the toy engine, whose hidden states are hashes of the text."""

from __future__ import annotations

import pytest
import torch

from benchmarks.replay import answers
from redraft.bundle.budget import BudgetTable
from redraft.llm import LLM
from redraft.method import MethodPlan
from redraft.prompts import Prompt
from redraft.request import request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import ToyEngine, only, toy_codec

PROMPTS = ["hello world", "abcabcabc", "to be or not to be"]


@pytest.fixture
def llm():
    engine = ToyEngine(width=4, length=3)
    plans = only(MethodPlan("best_first", budget=BudgetTable.constant(8)))
    limits = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=7)
    return LLM(Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans, prefix_reuse=False))


def test_answers_are_the_targets_own_and_hidden_states_those_of_the_text(llm):
    """Also across prefill chunks, and where a bundle drafts."""
    recorded = answers.record(llm, PROMPTS, 40, concurrency=2)
    plain = llm.run([request(text, 40, method="auto_regressive", temperature=0.0) for text in PROMPTS])
    assert [answer.text for answer in recorded] == [answer.token_ids for answer in plain]
    for answer, prompt in zip(recorded, PROMPTS, strict=True):
        tokens = answer.tokens.tolist()
        assert tokens[: answer.start] == llm.runtime.codec.encode(prompt)
        states = [llm.runtime.engine.path_state(tokens[: place + 1]) for place in range(len(tokens))]
        torch.testing.assert_close(answer.hidden, torch.tensor([[s >> 16, s & 0xFFFF] for s in states]).float())


def test_a_bundle_without_hidden_states_is_refused(llm, tmp_path, monkeypatch, capsys):
    execute = llm.runtime.engine.execute
    llm.runtime.engine.execute = lambda *given: (execute(*given)[0], None)
    llm.runtime.with_plans({})
    monkeypatch.setattr(answers, "load_llm", lambda parser, bundle: llm)
    monkeypatch.setattr(answers, "load_prompts", lambda path: [Prompt("1", "all", ("hello",))])
    monkeypatch.setattr(answers, "ChatTokenizer", lambda bundle: type("T", (), {"chat": staticmethod(str)}))
    with pytest.raises(SystemExit):
        answers.main(["--bundle", "b", "--max-tokens", "5", "--output", str(tmp_path)])
    assert "the bundle gives no features" in capsys.readouterr().err
