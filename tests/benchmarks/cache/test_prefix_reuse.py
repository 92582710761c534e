"""What the benchmark of prefix reuse sends, and what it makes of the times."""

from __future__ import annotations

import json

import pytest

from benchmarks.cache import prefix_reuse
from redraft.bundle.budget import BudgetTable
from redraft.llm import LLM
from redraft.method import MethodPlan
from redraft.prompts import Prompt
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import ToyEngine, only, toy_codec

CODEC = toy_codec()
LIMITS = Limits(slots=3, max_len=400, max_tree=24, prefill_chunk=64)
SIZES = {
    "chats": 2, "history": 70, "turn": 9, "system": 60, "turns": 3, "prompts": 4, "prompt": 33, "max-tokens": 5,
}  # fmt: skip


class Chats:
    """A chat template and a tokenizer without a folder."""

    encode, decode = CODEC.encode, CODEC.decode

    def __init__(self, bundle):
        pass

    def write(self, messages):
        return "".join(f"{message['role'][0]}:{message['content']}#" for message in messages)


def toy_llm(*_, prefix_reuse=True) -> LLM:
    engine = ToyEngine(slots=LIMITS.slots, max_len=LIMITS.max_len, max_tree=LIMITS.max_tree)
    plans = only(MethodPlan("best_first", budget=BudgetTable.constant(5)))
    return LLM(Runtime(engine, CODEC, LIMITS, engine.vocab_size, frozenset({0}), plans, prefix_reuse=prefix_reuse))


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(prefix_reuse, "PART", 15)
    monkeypatch.setattr(prefix_reuse, "ChatTokenizer", Chats)
    monkeypatch.setattr(prefix_reuse, "LLM", toy_llm)
    monkeypatch.setattr(prefix_reuse, "load_llm", lambda *_: toy_llm(prefix_reuse=False))
    words = [Prompt("1", "all", ("The quick brown fox jumps over the lazy dog; 0123456789 !?",))]
    monkeypatch.setattr(prefix_reuse, "load_prompts", lambda path: words)


def test_a_report(patched, tmp_path, capsys):
    sizes = [argument for name, size in SIZES.items() for argument in (f"--{name}", str(size))]
    prefix_reuse.main(["--bundle", "b", *sizes, "--output", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    turns = report["next turn"]["requests"]
    assert len(turns) == 2
    for turn in turns:
        assert 0.2 < turn["answered"] < 0.8
        assert turn["prompt"] >= 70 + 9
        assert turn["cached"] > 15, "at least the first turn: toy answers may be no text"
    assert [request["cached"] for request in report["system prompt"]["requests"]] == [60 + 2 + 2] * 3
    assert set(report["nothing shared"]) == {"first", "further"}
    medians = report["next turn"]["medians"]
    printed = capsys.readouterr().out
    assert f"{medians['reused']:.1f}" in printed
    assert f"{report['nothing shared']['further']['ratio']:.1%}" in printed


def test_next_turns_by_another_method(patched, tmp_path, capsys):
    sizes = [argument for name, size in SIZES.items() for argument in (f"--{name}", str(size))]
    prefix_reuse.main(["--bundle", "b", *sizes, "--other", "auto_regressive", "--output", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    (one,) = report["other methods"].values()
    assert [turn["anew, tokens/step"] for turn in one["requests"]] == [1.0, 1.0]
    assert one["medians"]["cached"] > 15
    assert "auto_regressive" in capsys.readouterr().out


def test_a_context_without_room_is_refused(patched, capsys):
    with pytest.raises(SystemExit):
        prefix_reuse.main(["--bundle", "b", "--history", "390"])
    assert "--history 390: expected a context of 440 tokens" in capsys.readouterr().err
