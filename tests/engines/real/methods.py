"""Bundles of a methods file on the real target, whose methods must change nothing: what tests of two files share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiler.bundle import build, check
from compiler.methods import read_methods
from model_defs.target.model import Target
from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.chat import render_chat
from redraft.decoding.verification import VERIFIERS
from redraft.llm import LLM
from redraft.prompts import load_prompts, spread
from redraft.request import request
from tests.engines.tiny import bundle_config

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = load_prompts(ROOT / "benchmarks" / "prompts.jsonl")
SETTINGS = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95}}


def llm_of(file: str, precision: str, smollm2: Path, output: Path) -> LLM:
    """An LLM of a bundle with all methods of benchmarks/`file`."""
    target, chosen = Target.from_folder(smollm2), read_methods(ROOT / "benchmarks" / "methods" / file)
    limits = LimitsInfo(slots=4, max_len=512, max_tree=32, prefill_chunk=128)
    config = bundle_config(target, {name: settings.info() for name, settings in chosen.items()}, limits, precision)
    check(config, target)
    build(config, target, smollm2, chosen, output, features=True)
    assert Bundle.load(output).config.methods.keys() == chosen.keys()
    return LLM(output)


def assert_nothing_changes(llm: LLM, smollm2: Path, sampling: Mapping[str, Any], prompts: int, tokens: int,
                           at_once: Sequence[int]) -> dict[str, float]:  # fmt: skip
    """Every method gives the tokens of auto-regressive decoding, where its verifier merges with sampling also sampled.
    Returns the tokens a step of every method that has a drafter."""
    texts = [render_chat(smollm2, prompt.turns[0]) for prompt in spread(PROMPTS, prompts)]
    gained: dict[str, float] = {}

    def answers(method: str, concurrency: int) -> list[list[int]]:
        requests = [request(text, tokens, method=method, **sampling, seed=i) for i, text in enumerate(texts)]
        found = llm.run(requests, concurrency)
        steps, accepted = (sum(getattr(answer.stats, key) for answer in found) for key in ("steps", "accepted"))
        gained[method] = 1 + accepted / max(steps, 1)
        return [answer.token_ids for answer in found]

    expected = answers("auto_regressive", prompts)
    assert gained.pop("auto_regressive") == 1
    for name, plan in llm.runtime.plans.items():
        if not sampling or VERIFIERS[plan.verification].merges:
            for concurrency in at_once:
                assert answers(name, concurrency) == expected, f"{name}, {concurrency} at once"
    return {name: length for name, length in gained.items() if name in llm.runtime.engine.drafters}
