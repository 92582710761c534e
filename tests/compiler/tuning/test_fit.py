"""Scores are fitted on a method at work, and then say how often nodes are accepted, at any temperature."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.compiler.tuning.bundle import gains
from redraft.compiler.tuning.measure import Bench, seed_of
from redraft.decoding.defaults import NGRAM_CHANCES
from redraft.decoding.scores import NgramScores, Scores
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.request import GenerateRequest, SamplingConfig
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.decoding.shared_noise import CODEC, SLOTS, VOCAB, AgreeingEngine
from tests.toy_engine import TOY, only

NODES = 8
PROMPTS = [CODEC.encode(text) for text in ("hello", "world", "again", "and", "more", "texts", "follow")]
LIMITS = Limits(slots=SLOTS, max_len=80, max_tree=NODES + 1, prefill_chunk=16)


class ErringEngine(AgreeingEngine):
    """A drafter whose logits are off by a little, as far as its path says."""

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        before = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        states = [self.follow(*pair) for pair in zip(before, batch.tokens.tolist(), strict=True)]
        return self.searched(3, states, self.guessed, noise)

    def guessed(self, state: int, level: int) -> np.ndarray:
        error = np.random.default_rng(state).normal(size=VOCAB).astype(np.float32)
        return self.logits_after(state) + 0.8 * error


class RepeatingEngine(AgreeingEngine):
    """A target whose logits depend on the last token only, so that texts repeat what came after it."""

    def path_state(self, tokens) -> int:
        return self.follow(self.seed, int(tokens[-1]))


class AstrayEngine(RepeatingEngine, ErringEngine):
    """Such a target, and a drafter that thinks the least likely tokens the likeliest."""

    def guessed(self, state: int, level: int) -> np.ndarray:
        return -self.logits_after(state)


@pytest.fixture
def bench():
    engine = ErringEngine(candidates=5)
    plan = MethodConfig(construction="best_first", tree_budget=NODES, support=VOCAB)
    runtime = Runtime(engine, CODEC, LIMITS, VOCAB, frozenset(), only(plan))
    return Bench(runtime, TOY, PROMPTS, 48, nodes=NODES)


def excess(bench: Bench, temperature: float) -> float:
    """Accepted nodes over those that the scores promise."""
    promised, accepted = 0.0, 0

    def observe(tree: TokenTree, index: int, verdict: Verdict) -> None:
        nonlocal promised, accepted
        promised += sum(math.exp(score) for _, _, score in tree.nodes[index][1:])
        accepted += len(verdict.path) - 1

    runtime = bench.runtime
    budget = BudgetTable.constant(NODES)
    plan = runtime.methods[TOY].changed(scores=bench.scores, budget=budget)
    runtime.with_methods(only(plan), observe)
    for key, prompt in enumerate(PROMPTS):
        sampling = SamplingConfig(temperature=temperature, seed=seed_of(prompt))
        request = GenerateRequest(id=str(key), input_ids=prompt, max_tokens=48, sampling=sampling)
        runtime.scheduler.submit(runtime.sequence(key, request))
    while not runtime.scheduler.idle:
        runtime.scheduler.step()
    return accepted / promised


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_fitted_scores_are_shares_of_accepted_nodes(bench, temperature):
    bench.scores = (Scores(sharpness=0.3),)
    assert excess(bench, temperature) > 1.5, "scores that trust the drafter too little"
    for _ in range(2):  # the further the scores that were used are off, the rougher is the fit
        bench.fit(temperature)
    assert [one.temperature for one in bench.scores] == [0.0, temperature]
    assert excess(bench, temperature) == pytest.approx(1, abs=0.2)
    assert bench.runtime.scheduler.idle


def test_fitted_odds_make_scores_of_ngrams_shares_of_accepted_nodes():
    engine = RepeatingEngine()
    engine.sharpness = 9.0
    plan = MethodConfig(construction=None, ngram=True, tree_budget=NODES)
    runtime = Runtime(engine, CODEC, LIMITS, VOCAB, frozenset(), only(plan))
    bench = Bench(runtime, TOY, PROMPTS, 48, NODES, scores=(Scores(ngram_odds=4.0),))
    assert excess(bench, 1.0) < 0.8, "scores that trust repetition too much"
    bench.fit(1.0)
    assert [one.temperature for one in bench.scores] == [0.0, 1.0]
    assert excess(bench, 1.0) == pytest.approx(1, abs=0.15)


def test_scores_of_a_mixed_batch_are_logs_of_chances(bench):
    """Greedy and sampled trees alike: a node's children together are at most as likely as it, and none is less likely
    than the budget asks."""
    trees: list[TokenTree] = []
    table = BudgetTable(entries=[BudgetEntry(running=1, nodes=NODES, chance=0.05)])
    plan = MethodConfig(construction="best_first", ngram=True, budget=table, support=VOCAB)
    runtime = bench.runtime
    runtime.with_methods(only(plan), lambda tree, place, _: trees.append(tree))
    for key, temperature in enumerate((0.0, 0.7, 1.0)):
        sampling = SamplingConfig(temperature=temperature, seed=key)
        request = GenerateRequest(id=str(key), text="abcabcab", max_tokens=50, sampling=sampling)
        runtime.scheduler.submit(runtime.sequence(key, request))
    while not runtime.scheduler.idle:
        runtime.scheduler.step()
    drafted = np.zeros(SLOTS, int)
    for tree in trees:
        for place, nodes in enumerate(tree.nodes):
            scores = np.array([score for _, _, score in nodes])
            below = np.zeros(len(nodes))
            np.add.at(below, [parent for _, parent, _ in nodes[1:]], np.exp(scores[1:]))
            assert (below <= np.exp(scores) * (1 + 1e-4)).all()
            assert scores.min() >= math.log(0.05)
            drafted[place] += len(nodes) - 1
    assert drafted.min() > 10


def test_chances_of_ngrams_are_those_of_greedy_answers():
    """Texts that repeat what came after their last token: in the end every guess is right."""
    plan = MethodConfig(construction=None, ngram=True, tree_budget=NODES)
    runtime = Runtime(RepeatingEngine(), CODEC, LIMITS, VOCAB, frozenset(), only(plan))
    bench = Bench(runtime, TOY, PROMPTS, 48, nodes=NODES)
    bench.fit_chances()
    assert bench.ngrams.chances[6][3] > NGRAM_CHANCES[6][3]
    assert bench.runtime.scheduler.idle


def test_what_fitted_scores_add_is_measured():
    """Beside the defaults, in this order: a drafter that is always wrong takes the only node where n-grams are thought
    nothing of."""
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=1, support=VOCAB)
    runtime = Runtime(AstrayEngine(candidates=5), CODEC, LIMITS, VOCAB, frozenset(), only(plan))
    bench = Bench(runtime, TOY, PROMPTS, 48, nodes=1)
    bench.ngrams = NgramScores(chances=dict.fromkeys(NGRAM_CHANCES, (0.001,) * 4), joint_odds=(0.1, 0.0))
    rows = {temperature: lengths for temperature, *lengths in gains(bench, math.inf)}
    assert rows.keys() == {0.0, 0.3, 0.7, 1.0}
    before, after = rows[0.0]
    assert before > 1.3
    assert after == 1
    assert gains(bench, time.monotonic()) == []


def test_fitted_guesses_change_what_is_drafted_and_no_text():
    """Whatever stands in a bundle: greedy and seeded answers are those of auto-regressive decoding."""
    shy = NgramScores(chances=dict.fromkeys(NGRAM_CHANCES, (0.02, 0.03, 0.04, 0.05)), joint_odds=(0.1, 0.0))
    texts, drafted = {}, {}
    for name, ngrams in {"defaults": NgramScores(), "fitted": shy}.items():
        plan = MethodConfig(construction="best_first", ngram=True, tree_budget=NODES, support=VOCAB)
        engine = ErringEngine(candidates=5)
        runtime = Runtime(engine, CODEC, LIMITS, VOCAB, frozenset(), only(plan.changed(ngram_scores=ngrams)))
        trees: list[TokenTree] = []
        runtime.with_methods(runtime.methods, lambda tree, *_, trees=trees: trees.append(tree))
        for key, temperature in enumerate((0.0, 0.7, 1.0)):
            sampling = SamplingConfig(temperature=temperature, seed=key)
            request = GenerateRequest(id=str(key), text="abcabcab", max_tokens=40, sampling=sampling)
            runtime.scheduler.submit(runtime.sequence(key, request))
        texts[name] = {key: [] for key in range(3)}
        while not runtime.scheduler.idle:
            for output in runtime.scheduler.step():
                texts[name][output.key] += output.token_ids
        drafted[name] = [node for tree in trees for nodes in tree.nodes for node in nodes]
    assert texts["fitted"] == texts["defaults"]
    assert drafted["fitted"] != drafted["defaults"]
