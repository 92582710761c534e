"""The scheduler with a controller of budgets: what is drafted changes, the text does not."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import TimesByNodes, TimeTable
from redraft.budgets.learned import LearnedFile
from redraft.budgets.warm_up import time_steps
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.folder import MANIFEST
from redraft.bundle.method import MethodConfig
from redraft.runtime import Runtime, first_estimates
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import CODEC, LIMITS, PLANS, SAMPLINGS, alone, make, run
from tests.toy_engine import TOY, ToyEngine, only


class Wavering(BudgetController):
    """Drafts, or does not, and verifies as much as chance says."""

    def __init__(self, estimates):
        super().__init__(estimates)
        self.rng = np.random.default_rng(0)
        self.shared: list[int] = []

    def pays(self, method, bands):
        self.balance_s = 1.0 if self.rng.random() < 0.7 else -1.0
        return super().pays(method, bands)

    def terms(self, method, beside=0):
        """Nodes of other trees each time, as many as a cliff in the times leaves."""
        terms = super().terms(method, beside)
        rows = terms.times.rows + int(self.rng.integers(0, 20))
        cliff = TimeTable(sequences=1, rows=[rows, rows + 1], seconds=[1e-3, 1e3], padded=True)
        ratios = self.rng.random(len(terms.ratios)).tolist()
        return terms._replace(ratios=ratios, times=TimesByNodes(cliff, terms.times.rows, 1.0, 0.0))

    def take(self, method, choice, beside=0):
        super().take(method, choice, beside)
        self.shared += choice.counts


def controller(kind=BudgetController):
    return kind(Estimates(costs=time_steps(ToyEngine(slots=3), LIMITS, 9)))


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "top-p"])
@pytest.mark.parametrize("plan", ["beam", "best_first", "ngram", "merged"])
def test_the_text_does_not_depend_on_what_is_verified(plan, sampling):
    budgets = controller(Wavering)
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS[plan]), budgets=budgets)
    sequences = [make(key, SAMPLINGS[sampling], prompt=[1 + key] * 9) for key in range(3)]
    results = run(scheduler, sequences, joins=[0, 0, 4])
    for key in range(3):
        assert results[key][:4] == alone(make(key, SAMPLINGS[sampling], prompt=[1 + key] * 9), slots=3)
    assert len(set(budgets.shared)) > 1 or plan == "ngram", "trees are cut in many ways"


def test_no_drafter_is_called_where_the_ledger_is_empty():
    engine, budgets = ToyEngine(slots=3), controller()
    budgets.balance_s = -1e9
    run(Scheduler(engine, LIMITS, only(PLANS["best_first"]), budgets=budgets), [make("a")])
    assert engine.draft_calls == 0


def test_sequences_that_nothing_is_drafted_for_are_seldom_asked():
    """A step in five learns, and each step of other sequences than before. The text is the same."""
    begun: list[int] = []

    class Noting(BudgetController):
        def begin(self, shape):
            super().begin(shape)
            begun.append(shape.running)

    engine, budgets = ToyEngine(slots=3), controller(Noting)
    budgets.balance_s = -1e9
    scheduler = Scheduler(engine, LIMITS, only(PLANS["best_first"]), budgets=budgets)
    begun.clear()
    results = run(scheduler, [make(key) for key in range(2)], joins=[0, 9])
    assert engine.draft_calls == 0
    assert results[0][:4] == results[1][:4] == alone(make(0), slots=3)
    assert len(begun) < 2 * 40 / 3
    assert {1, 2} <= set(begun)


def test_nothing_is_kept_of_a_request_that_has_ended():
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["best_first"]), budgets=controller())
    sequence = make(0)
    run(scheduler, [sequence])
    kept = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert kept() is None


def test_a_fixed_budget_does_not_ask():
    engine, budgets = ToyEngine(slots=3), controller()
    budgets.balance_s = -1e9
    plan = MethodConfig(construction="best_first", budget=BudgetTable.constant(4))
    run(Scheduler(engine, LIMITS, only(plan), budgets=budgets), [make("a")])
    assert engine.draft_calls > 0


def test_budgets_begin_with_what_training_measured():
    methods = {"measured": MethodConfig(acceptance_ratio=0.9), "unknown": MethodConfig()}
    first = first_estimates(ToyEngine(slots=3), LIMITS, methods)
    assert {name: calibration.ratios([0])[0] for name, calibration in first.calibrations.items()} == {"measured": 0.9}


def test_a_runtime_keeps_what_was_learned(tmp_path):
    (tmp_path / MANIFEST).write_text("{}")
    budgets = controller()
    methods, learned = {TOY: PLANS["beam"]}, LearnedFile.of(tmp_path)
    runtime = Runtime(ToyEngine(slots=3), CODEC, LIMITS, 111, methods=methods, budgets=budgets, learned=learned)
    run(runtime.scheduler, [make("a")])
    runtime.keep_learned()
    assert LearnedFile.of(tmp_path).load() == budgets.estimates
    assert budgets.estimates.calibrations[TOY].ratios([0])[0] != 0.5
