"""Every method that is compared, and every shipped drafter with every construction, on the real target: speculation
changes nothing."""

from pathlib import Path

import pytest

from benchmarks.inprocess import Session, request
from build_engines import build, check
from methods import read_methods
from model_defs.target import Target
from redraft.bundle import Bundle, LimitsInfo
from redraft.chat import render_chat
from redraft.decoding.verification import VERIFIERS
from redraft.prompts import load_prompts, spread
from tests.engines.tiny import bundle_config

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = load_prompts(ROOT / "benchmarks" / "prompts.jsonl")
ASKED = {"methods": ("bf16", 4, 24, (1, 4), 1.15), "lossless": ("fp32", 2, 16, (2,), 1.1)}
"""Of a file's methods: precision, prompts, tokens, how many at once, and what each drafter gains at least."""


@pytest.fixture(scope="module", params=ASKED)
def asked(request):
    return request.param


@pytest.fixture(scope="module")
def session(asked, smollm2, tmp_path_factory) -> Session:
    target, output = Target.from_folder(smollm2), tmp_path_factory.mktemp("methods") / "bundle"
    chosen = read_methods(ROOT / "benchmarks" / f"{asked}.toml")
    limits = LimitsInfo(slots=4, max_len=512, max_tree=32, prefill_chunk=128)
    config = bundle_config(
        target, {name: settings.info() for name, settings in chosen.items()}, limits, ASKED[asked][0]
    )
    check(config, target)
    build(config, target, smollm2, chosen, output, hidden=True)
    assert Bundle.load(output).config.methods.keys() == chosen.keys()
    return Session.load(output)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_every_method_gives_the_tokens_of_auto_regressive_decoding(session, asked, smollm2, sampling):
    _, prompts, tokens, at_once, least = ASKED[asked]
    texts = [render_chat(smollm2, prompt.turns[0]) for prompt in spread(PROMPTS, prompts)]

    def answers(method: str, concurrency: int) -> list[list[int]]:
        requests = [request(text, tokens, method=method, **sampling, seed=i) for i, text in enumerate(texts)]
        found = session.run(requests, concurrency)
        steps, accepted = (sum(getattr(answer.stats, key) for answer in found) for key in ("steps", "accepted"))
        gained[method] = 1 + accepted / max(steps, 1)
        return [answer.token_ids for answer in found]

    gained: dict[str, float] = {}
    expected = answers("auto_regressive", prompts)
    for name, plan in session.runtime.plans.items():
        if not sampling or VERIFIERS[plan.verification].merges:
            for concurrency in at_once:
                assert answers(name, concurrency) == expected, f"{name}, {concurrency} at once"
    assert gained.pop("auto_regressive") == 1
    without = {name for name, plan in session.runtime.plans.items() if name not in session.runtime.engine.drafters}
    assert min(length for name, length in gained.items() if name not in without) > least
