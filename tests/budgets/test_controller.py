"""What a controller counts beside the nodes that it chooses."""

from __future__ import annotations

import math

import pytest

from redraft.budgets.choice import choose_nodes
from redraft.budgets.controller import (
    ALLOWED_LOSS,
    FIRST_PLAIN,
    MOST_UNASKED,
    PLAIN_EVERY,
    BudgetController,
    Estimates,
    History,
)
from redraft.budgets.cost import StepCosts, StepShape, TimeTable
from redraft.decoding.token_tree import TokenTree

CLIFF = 16
TREE = TokenTree.from_nodes([[(0, -1, 0.0), *((1, node, 0.5 * math.log(0.9) * node) for node in range(12))]])


@pytest.fixture
def controller():
    """Steps of more than 16 rows take four times as long."""
    table = TimeTable(sequences=8, rows=[CLIFF, 4 * CLIFF], seconds=[0.01, 0.04], padded=True)
    controller = BudgetController(Estimates(costs=StepCosts(tables=[table])))
    for shape in (StepShape(1), StepShape(2)):
        for _ in range(FIRST_PLAIN):
            plain_step(controller, shape)
    controller.begin(StepShape(2))
    return controller


def share(controller: BudgetController, tree: TokenTree, beside: int = 0) -> list[int]:
    choice = choose_nodes(tree, controller.terms("chosen", beside))
    controller.take("chosen", choice, beside)
    return choice.counts


def test_a_cliff_is_kept_to_where_another_method_has_a_fixed_budget(controller):
    controller.include("fixed", [0], TREE)
    assert controller.pays("chosen", [0])
    assert share(controller, TREE) == [CLIFF - 2 - 12]


def test_a_cliff_is_kept_to_where_other_nodes_are_verified_beside(controller):
    assert controller.pays("chosen", [0])
    assert share(controller, TREE, beside=5) == [CLIFF - 2 - 5]
    assert controller.step.rows == CLIFF


def test_first_steps_at_a_load_are_plain_and_then_one_in_a_hundred(controller):
    drafted = []
    for _ in range(FIRST_PLAIN + PLAIN_EVERY + 2):
        controller.begin(StepShape(5))
        drafted.append(controller.pays("chosen", [0]))
        tree = TREE if drafted[-1] else TokenTree.root_only([0])
        if drafted[-1]:
            share(controller, tree)
        controller.end(["chosen"], [0], tree, [len(tree.tokens) - 1], 0.01, 0.01)
    assert drafted == [False] * FIRST_PLAIN + [True] * PLAIN_EVERY + [False, True]


def test_what_a_fixed_budget_loses_is_no_loss_of_what_was_chosen(controller):
    """The step takes as long as expected of the fixed budget."""
    for _ in range(20):
        controller.begin(StepShape(1))
        controller.include("fixed", [0], TREE)
        controller.end(["fixed"], [0], TREE, [1], 0.02, 0.01)
    before = controller.balance_s
    controller.begin(StepShape(2))
    controller.include("fixed", [0], TREE)
    assert controller.pays("chosen", [0])
    both = TokenTree.from_nodes([TREE.nodes[0], TREE.nodes[0][:2]])
    share(controller, both.of([1]))
    controller.end(["fixed", "chosen"], [0, 0], both, [0, 0], 0.02, 0.01)
    assert controller.balance_s == pytest.approx(before, abs=0.01)


def test_methods_with_a_fixed_budget_are_calibrated(controller):
    for _ in range(400):
        controller.begin(StepShape(1))
        controller.include("fixed", [0], TREE)
        controller.end(["fixed"], [0], TREE, [3], 0.02, 0.01)
    assert controller.step.fixed["fixed"].expected == pytest.approx(3, rel=0.1)


def plain_step(controller: BudgetController, shape: StepShape, *asks: str, fixed: str | None = None) -> None:
    """A step in which these methods ask, and none drafts."""
    controller.begin(shape)
    if fixed:
        controller.include(fixed, [0], TokenTree.root_only([0]))
    assert not any(controller.pays(method, [0]) for method in asks)
    controller.end(["chosen"], [0], TokenTree.root_only([0]), [0], 0.01, 0.01)


def test_nothing_is_asked_while_the_ledger_saves_for_a_probe(controller):
    controller.balance_s = 0.0
    plain_step(controller, StepShape(1), "chosen", "other")
    assert controller.unasked == MOST_UNASKED
    before = controller.balance_s
    for left in reversed(range(MOST_UNASKED)):
        controller.note_unasked(0.01)
        assert controller.unasked == left
    assert controller.balance_s == pytest.approx(before + MOST_UNASKED * ALLOWED_LOSS * 0.01)


def test_a_probe_is_not_late(controller):
    controller.balance_s = 0.0
    plain_step(controller, StepShape(1), "chosen")
    loss_s = controller.costs.of(StepShape(1)).step(2, "chosen") - controller.costs.of(StepShape(1)).step(1, "")
    controller.balance_s = loss_s - 1.5 * ALLOWED_LOSS * 0.01
    plain_step(controller, StepShape(1), "chosen")
    assert controller.unasked == 1


@pytest.mark.parametrize("case", ["prompts", "nobody asks", "a fixed budget"])
def test_every_step_is_asked_where_its_answer_may_change(controller, case):
    shape, asks, fixed = StepShape(1), ["chosen"], None
    controller.balance_s = 0.0
    if case == "prompts":
        shape = StepShape(1, 1, 5)
    elif case == "nobody asks":
        asks = []
    else:
        fixed = "fixed"
    plain_step(controller, shape, *asks, fixed=fixed)
    assert controller.unasked == 0


@pytest.mark.parametrize("promised", [None, 0.5, 30.0])
def test_guesses_suffice_where_the_last_drafts_were_no_faster(controller, promised):
    """Their steps are known apart, and say nothing of what drafts promise."""
    histories = controller.estimates.histories
    if promised is not None:
        histories["chosen:1:0"] = History(promised=promised, slower=1.5)
    before = histories.copy()
    assert controller.pays("chosen", [0])
    terms = controller.guess_terms("chosen")
    assert not terms.probes
    choice = choose_nodes(TREE, terms)
    assert controller.guesses_suffice("chosen", choice) is (promised != 30.0)
    if promised == 30.0:
        assert controller.step.drafting() == "chosen"
        return
    controller.take("chosen", choice)
    controller.end(["chosen"], [0], TREE, [3], 0.012, 0.01)
    assert histories == before
    assert "chosen, guessing:1" in controller.costs.others
