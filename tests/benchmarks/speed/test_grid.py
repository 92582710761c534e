"""Replay over known answers gives the acceptance of live runs.

The slow cases would catch a kind of drafter whose context is replayed at other places than in live decoding.
"""

import argparse

import numpy as np
import pytest

from benchmarks.speed import grid
from redraft.bundle.budget import BudgetTable, Scores
from redraft.decoding.token_tree import TokenTree
from redraft.engines import load_engine
from redraft.llm import LLM
from redraft.method import MethodPlan
from redraft.request import request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.conftest import slow
from tests.decoding.shared_noise import LENGTH, AgreeingEngine
from tests.engines.tiny import METHOD, VOCAB, tiny_bundle, tiny_drafter_of, tiny_target
from tests.toy_engine import ToyEngine, only, toy_codec

LIMITS = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
PROMPTS = ["hello world", "abcabcabc", "to be or not to be"]


@pytest.fixture
def llm():
    engine = ToyEngine(width=4, length=3)
    plan = MethodPlan("best_first", budget=BudgetTable.constant(8))
    return LLM(Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), only(plan), prefix_reuse=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        (grid.Shape(0, 3, 6), MethodPlan("best_first", budget=BudgetTable.constant(6))),
        (grid.Shape(0, 3, 6, True), MethodPlan("best_first", ngram=True, budget=BudgetTable.constant(6))),
        (grid.Shape(4, 3), MethodPlan("beam", budget=BudgetTable.constant(31))),
        (grid.Shape(1, 3), MethodPlan("chain", budget=BudgetTable.constant(31))),
        (grid.Shape(0, 5, 0, True), MethodPlan(None, ngram=True, budget=BudgetTable.constant(31))),
    ],
)
def test_replay_equals_a_live_run(llm, shape, plan, temperature):
    replays = grid.record(llm, PROMPTS, 60, {"temperature": temperature}, batch=4)
    outcome = grid.Outcome()
    for replay in replays:
        grid.follow(grid.build_trees(shape, replay), replay.tokens, outcome)
    llm.runtime.with_plans(only(plan))
    live = llm.run([request(text, 60, temperature=temperature, seed=i) for i, text in enumerate(PROMPTS)])
    assert [answer.token_ids for answer in live if len(answer.token_ids) > 1] == [replay.tokens for replay in replays]
    live_steps = sum(answer.stats.steps for answer in live)
    assert outcome.steps > 10
    # Live, an end token is one more step, and the last trees are cut to the tokens that remain.
    assert outcome.steps == pytest.approx(live_steps, abs=len(PROMPTS))
    assert outcome.accepted == pytest.approx(sum(answer.stats.accepted for answer in live), abs=len(PROMPTS))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_replay_drafts_by_the_noise_and_the_scores_of_a_live_run(top_p):
    """A drafter that is the target accepts all by its noise; with a slope it errs, and a replay errs with it."""
    sampling, scores = {"temperature": 0.7, "top_p": top_p}, (Scores(), Scores(temperature=0.5, slope=1.6))
    budget = BudgetTable.constant(31).model_copy(update={"scores": scores})
    limits, plans = Limits(slots=3, max_len=80, max_tree=24, prefill_chunk=16), only(MethodPlan("chain", budget=budget))
    llm = LLM(Runtime(AgreeingEngine(), toy_codec(), limits, VOCAB, frozenset(), plans, prefix_reuse=False))
    replays, outcome = grid.record(llm, PROMPTS, 40, sampling, batch=3), grid.Outcome()
    for replay in replays:
        grid.follow(grid.build_trees(grid.Shape(1, LENGTH), replay), replay.tokens, outcome)
    llm.runtime.with_plans(plans)
    live = llm.run([request(text, 40, **sampling, seed=i) for i, text in enumerate(PROMPTS)])
    assert [answer.token_ids for answer in live] == [replay.tokens for replay in replays]
    assert outcome.accepted == pytest.approx(sum(answer.stats.accepted for answer in live), abs=len(PROMPTS))
    whole = outcome.steps * LENGTH - outcome.accepted < LENGTH * len(PROMPTS)
    assert whole == (top_p < 1), "top-p leaves the slope out"


@pytest.mark.parametrize("kind", [slow("hidden_state"), "eagle", slow("draft_lm")])
def test_a_drafter_that_reads_the_context_is_replayed(tmp_path, kind):
    """Live decoding's drafts are those of the same places, in their order."""
    target = tiny_target()
    engine = load_engine(tiny_bundle(tmp_path, target, trained=tiny_drafter_of(target, kind, hot=None)))
    plan = MethodPlan("best_first", ngram=True, budget=BudgetTable.constant(6))
    limits = Limits(slots=4, max_len=80, max_tree=32, prefill_chunk=16)
    llm = LLM(Runtime(engine, toy_codec(), limits, VOCAB, frozenset(), {METHOD: plan}, prefix_reuse=False))
    replay = grid.record(llm, ["abcabcabc hello"], 40, {"temperature": 0.0}, batch=4)[0]
    drafter, live = engine.drafters[METHOD], list[np.ndarray]()
    draft = drafter.draft

    def noted(batch, noise):
        drafted = draft(batch, noise)
        live.append(drafted.log_probs.copy())
        return drafted

    drafter.draft = noted
    llm.runtime.with_plans({METHOD: plan})
    assert llm.run([request("abcabcabc hello", 40, temperature=0.0)])[0].token_ids == replay.tokens
    places = iter(replay.drafts.log_probs)
    assert len(live) > 10
    assert all(any(np.array_equal(found, here[0]) for found in places) for here in live)


def test_following_a_tree_by_hand():
    tree = TokenTree.from_nodes(
        [[(7, -1, 0.0), (8, 0, -1.0), (9, 1, -2.0), (5, 0, -3.0)], [(1, -1, 0.0)], [(9, -1, 0.0)]]
    )
    outcome = grid.Outcome()
    grid.follow(tree, [7, 8, 9, 4], outcome)
    assert (outcome.steps, outcome.accepted, outcome.rows) == (1, 2, 4)
    assert outcome.acceptance_length == 3


def test_grid_of_a_bundle(llm):
    args = argparse.Namespace(max_tokens=40, temperature=0.0, batch=4, budgets=[2, 8])
    results = grid.measure(llm, PROMPTS, args, "toy")
    by_shape = {row["shape"]: row for row in results}
    assert by_shape["best 8, depth 3"]["acceptance_length"] >= by_shape["best 2, depth 3"]["acceptance_length"]
    assert by_shape["best 8, depth 3"]["rows_per_step"] == pytest.approx(9)
    assert by_shape["n-grams"]["rows_per_step"] <= 6
    assert "beams 4 x 3 + n-grams" in by_shape
    assert all(np.isfinite(row["projected_speedup"]) for row in results)
    table = grid.table(results)
    assert len(table.rows) == len(results)
    assert table.rows[0][-1] >= table.rows[-1][-1]
