"""What every method on the real target must keep: speculation changes nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.chat import render_chat
from redraft.decoding.verification import VERIFIERS
from redraft.llm import LLM
from redraft.prompts import load_prompts, spread
from redraft.request import request
from tests.conftest import ROOT

PROMPTS = load_prompts(ROOT / "benchmarks" / "prompts.jsonl")
SETTINGS = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95}}


def assert_nothing_changes(llm: LLM, smollm2: Path, sampling: Mapping[str, Any], prompts: int, tokens: int,
                           at_once: Sequence[int]) -> dict[str, float]:  # fmt: skip
    """Every method gives the tokens of auto-regressive decoding, where its verifier merges with sampling also sampled.
    Returns the tokens a step of every method that has a drafter."""
    texts = [render_chat(smollm2, prompt.turns[0]) for prompt in spread(PROMPTS, prompts)]
    llm.runtime.fix_budget()  # drafts where none pay, too
    gained: dict[str, float] = {}

    def answers(method: str, concurrency: int) -> list[list[int]]:
        requests = [request(text, tokens, method=method, **sampling, seed=i) for i, text in enumerate(texts)]
        found = llm.run(requests, concurrency)
        steps, accepted = (sum(getattr(answer.stats, key) for answer in found) for key in ("steps", "accepted"))
        gained[method] = 1 + accepted / max(steps, 1)
        return [answer.token_ids for answer in found]

    expected = answers("auto_regressive", prompts)
    assert gained.pop("auto_regressive") == 1
    for name, plan in llm.runtime.methods.items():
        if not sampling or VERIFIERS[plan.verification].merges:
            for concurrency in at_once:
                assert answers(name, concurrency) == expected, f"{name}, {concurrency} at once"
    return {name: length for name, length in gained.items() if name in llm.runtime.engine.drafters}
