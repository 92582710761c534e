"""Conversations served with drafts from served texts, and without: the same texts, in fewer steps."""

from __future__ import annotations

import json

import pytest

from benchmarks.served import compare
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.drafting.served import ServedTexts
from redraft.llm import LLM
from redraft.prompts import Prompt, load_prompts
from redraft.request import request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import TOY, ToyEngine, toy_codec

LIMITS = Limits(slots=3, max_len=512, max_tree=32, prefill_chunk=32)


class Tokenizer:
    """Writes a conversation as its turns, one after the other."""

    def __init__(self, _):
        pass

    def request_of(self, messages, max_tokens):
        return request(" ".join(message["content"] for message in messages), max_tokens)


def llm(texts):
    engine = ToyEngine(slots=LIMITS.slots, max_len=LIMITS.max_len)
    method = MethodConfig(construction="best_first", ngram=True, budget=BudgetTable.constant(12))
    return LLM(Runtime(engine, toy_codec(), LIMITS, 111, frozenset({0}), {TOY: method}, texts=texts))


def test_the_same_texts_take_fewer_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "ChatTokenizer", Tokenizer)
    prompts = [Prompt(str(number), "", ("hello", "and then?")) for number in range(3)]
    engines = [llm(None), llm(ServedTexts(compare.OPTIONS)), llm(None)]
    figures = compare.compare(engines, tmp_path, prompts, 40)
    assert figures["identical"]
    assert figures["conversations"] == 3
    assert figures["tokens"] > 100
    assert figures["tokens_per_step"] > 1.3 * figures["without_tokens_per_step"]
    assert figures["control"].keys() == {"speed_up", "interval"}
    assert len(compare.table({"edits": figures}).rows) == 1


@pytest.mark.parametrize("file", compare.WORKLOADS)
def test_workloads_are_conversations(file):
    prompts = load_prompts(file, all_turns=True)
    assert len(prompts) == len(file.read_text().splitlines())
    assert all(len(prompt.turns) > 1 for prompt in prompts)
    assert all(json.loads(line)["category"] for line in file.read_text().splitlines())
