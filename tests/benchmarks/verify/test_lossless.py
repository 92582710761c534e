"""Speculative against auto-regressive output, on the toy engine."""

import json

import numpy as np
import pytest

from benchmarks.verify import lossless
from redraft.bundle.method import MethodConfig
from redraft.decoding.noise import race
from redraft.decoding.sampling import Distribution, Sampler
from redraft.llm import LLM
from redraft.request import AUTO_REGRESSIVE, SamplingConfig, request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import TOY, ToyEngine, only, toy_codec

RSD = MethodConfig(
    construction="stochastic_beam", verification="recursive_rejection", tree_budget=4, levels=(2, 2), support=5
)
LIMITS = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)


def llm(budget=None, end_ids=(0,), **engine):
    plan = None if budget is None else MethodConfig(construction="best_first", ngram=True, tree_budget=budget)
    toy = ToyEngine(**engine)
    return LLM(Runtime(toy, toy_codec(), LIMITS, toy.vocab_size, frozenset(end_ids), only(plan), prefix_reuse=False))


@pytest.fixture
def verify(tokenizer_folder, tmp_path):
    def call(auto_regressive, speculative, chosen=None, same_methods=False, **options):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("hello", "to be or not", "abab")))
        (tokenizer_folder / "manifest.json").write_text("{}")
        plan = {
            "bundles": [tokenizer_folder], "prompts": prompts, "num_prompts": 3, "max_tokens": 24,
            "settings": list(lossless.SETTINGS), "concurrency": [1, 3], "near_tie": 1e-3, "margin": 0.5,
            "output": tmp_path / "report.json",
        }  # fmt: skip
        verifier = lossless.Verifier(auto_regressive, speculative, auto_regressive, chosen, same_methods)
        report = lossless.verify(verifier, lossless.Plan(**plan | options))
        for table in lossless.tables(report):
            table.show(lossless.console)
        return report

    return call


def test_speculation_is_found_lossless(verify, capsys):
    report = verify(llm(), llm(8))
    assert [row["failures"] for row in report["settings"]] == [0] * 12
    assert all(row["tokens"] > 0 for row in report["settings"])
    assert max(row["acceptance_length"] for row in report["settings"]) > 1.2
    assert {row["beyond_margin"] for row in report["rates"]} == {0}
    assert "near-ties" in capsys.readouterr().out


def test_every_method_is_compared_where_it_promises_the_same_tokens(verify):
    both = llm(8)
    plans = {
        TOY: both.runtime.methods[TOY],
        "alone": MethodConfig(construction=None, verification="greedy", ngram=True),
        "rsd": RSD,
    }
    both.runtime.methods = plans
    both.runtime.with_methods({name: plan for name, plan in plans.items() if name != "rsd"})
    verifier = lossless.Verifier(both, both, both)
    assert verifier.methods("greedy, penalties") == [TOY, "alone", "rsd"]
    assert verifier.methods("temperature 1") == [TOY, "alone"]
    report = verify(both, both, chosen=[TOY, "alone"])
    assert [row["method"] for row in report["settings"][:4]] == [TOY, TOY, "alone", "alone"]
    assert not any(row["failures"] for row in report["settings"])


def test_a_method_is_compared_with_itself_on_one_rank(verify):
    both = llm(8)
    plans = {TOY: both.runtime.methods[TOY], "rsd": RSD}
    both.runtime.methods = plans
    assert lossless.Verifier(both, both, both, same_methods=True).methods("temperature 1") == [
        AUTO_REGRESSIVE,
        TOY,
        "rsd",
    ]
    report = verify(llm(8), llm(8), same_methods=True)
    assert [row["method"] for row in report["settings"][:4]] == [AUTO_REGRESSIVE, AUTO_REGRESSIVE, TOY, TOY]
    assert not any(row["failures"] for row in report["settings"])


def test_another_target_fails(verify, capsys):
    report = verify(llm(), llm(8, seed=1))
    assert sum(row["failures"] for row in report["settings"]) > 0
    assert max(item["margin"] for item in report["divergences"]) > 1e-3
    assert {row["beyond_margin"] > 0 for row in report["rates"]} == {False, True}
    assert "Divergences" in capsys.readouterr().out


def test_the_distance_from_a_token_is_that_of_its_arrival():
    noise, sampler = race(3, 0, np.arange(4)), Sampler(SamplingConfig(temperature=1.0, seed=3), [])
    for ids, weights in ((None, [2.0, 1.0, 0.0, 4.0]), (np.array([0, 1, 3]), [2.0, 1.0, 4.0])):
        distribution = Distribution(ids, np.array(weights, np.float32), 7.0)
        winner = sampler.draw(distribution)
        distances = [lossless.distance_from(token, sampler, distribution) for token in range(4)]
        times = noise / [2.0, 1.0, 1.0, 4.0]
        expected = [1 - times[winner] / times[token] if token != 2 else 1.0 for token in range(4)]
        np.testing.assert_allclose(distances, expected, atol=1e-6)


def test_a_token_at_the_edge_of_top_p_is_a_near_tie(monkeypatch):
    """Two tokens hold exactly top-p of the sum: with one part in a million more, the third may be drawn."""
    runs = llm()
    logits = np.full(111, -np.inf, np.float32)
    logits[:3] = np.log([0.5, 0.25, 0.25])
    monkeypatch.setattr(lossless, "teacher_force", lambda *_: [(logits[None], None)])
    near = 0
    for seed in range(40):
        generation = request("hello", 4, temperature=1.0, top_p=0.75, seed=seed)
        sampler = runs.runtime.sequence(0, generation).sampler
        if Sampler(generation.sampling.model_copy(update={"top_p": 0.76}), [1]).choose(logits) == 2:
            near += 1
            assert sampler.choose(logits) != 2
            assert lossless.margin_at(runs, generation, [sampler.choose(logits)], 0, 2) <= 1e-6
    assert near > 3


def rejecting(**engine):
    """An LLM whose method rejects drafts."""
    toy = DrawingToyEngine("stochastic_beam", RSD.levels, RSD.support, vocab_size=111, **engine)
    return LLM(Runtime(toy, toy_codec(), LIMITS, toy.vocab_size, frozenset(), only(RSD), prefix_reuse=False))


def test_what_rejection_decides_has_the_margin_of_its_own_random_numbers(verify):
    runs, generation = rejecting(), request("hello", 24, method=TOY, temperature=1.0, seed=3)
    expected = runs.run([generation])[0].token_ids
    margins = [lossless.rejection_margin(runs, generation, expected, place, 7) for place in range(1, 24)]
    known = [margin for margin in margins if margin is not None]
    assert len(known) > 12
    assert all(0 <= margin < 1 for margin in known)
    assert len(set(known)) > len(known) / 2
    assert lossless.rejection_margin(runs, generation, [*expected[:8], -1], 8, 7) == np.inf
    report = verify(rejecting(), rejecting(seed=1), same_methods=True, settings=["temperature 1"], concurrency=[1])
    assert sum(row["failures"] for row in report["settings"]) > 0


def test_a_tiny_margin_is_a_near_tie(verify):
    report = verify(llm(), llm(8, seed=1), near_tie=1e9)
    assert sum(row["failures"] for row in report["settings"]) == 0
    assert sum(row["near_ties"] for row in report["settings"]) > 0


def test_a_verification_goes_on_where_it_was_cut_short(verify, monkeypatch, capsys):
    whole, one = verify(llm(), llm(8)), lossless.verify_setting
    calls = []

    def cut(verifier, setting, *rest):
        calls.append(setting)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return one(verifier, setting, *rest)

    monkeypatch.setattr(lossless, "verify_setting", cut)
    with pytest.raises(KeyboardInterrupt):
        verify(llm(), llm(8))
    assert verify(llm(), llm(8)) == whole
    assert calls == [*list(lossless.SETTINGS)[:3], *list(lossless.SETTINGS)[2:]]
    verify(llm(), llm(8), max_tokens=23)
    assert calls[-6:] == list(lossless.SETTINGS)
