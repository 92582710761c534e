"""Where the drafter agrees with the target and shares its noise, every drafted token is accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.drafting import inputs
from redraft.plugins.operators.perturbed_topk.reference import perturbed_topk
from tests.decoding.shared_noise import LENGTH, AgreeingEngine, ChainEngine, Outcome, chain_plan, generate
from tests.mutants import Mutant, planted

WHOLE = BudgetTable.constant(LENGTH)
CUT = BudgetTable.constant(2)
"""Leaves the rest of a chain to draft again from."""
BUSY = BudgetTable(
    entries=[
        BudgetEntry(running=1, nodes=4),
        BudgetEntry(running=2, nodes=3),
        BudgetEntry(running=3, nodes=0),
        BudgetEntry(running=1, temperature=0.3, nodes=4),
        BudgetEntry(running=2, temperature=0.3, nodes=0),
        BudgetEntry(running=3, temperature=0.3, nodes=2),
    ]
)
"""Where no sequence drafts at every load."""
AGAIN = chain_plan(CUT, resample_above=0, resample_budget=2)
SKIPPING = chain_plan(CUT, resample_above=0, resample_budget=2, skip_above=1)

CASES: dict[str, Callable[[], Outcome]] = {
    "whole chains": lambda: generate(AgreeingEngine(), chain_plan(WHOLE)),
    "of five candidates": lambda: generate(AgreeingEngine(candidates=5), chain_plan(WHOLE)),
    "after a budget of 0": lambda: generate(AgreeingEngine(), chain_plan(BUSY)),
    "after a re-sampled draft": lambda: generate(ChainEngine(), AGAIN),
    "after a skipped draft": lambda: generate(ChainEngine(), SKIPPING),
}


@pytest.mark.parametrize("case", CASES)
def test_every_draft_is_accepted(case):
    outcome = CASES[case]()
    assert outcome.all_accepted
    assert min(outcome.drafted.values()) > 10
    if case == "after a budget of 0":
        assert 0 in outcome.sizes[3:-3]


@pytest.mark.parametrize(
    ("engine", "plans"),
    [(AgreeingEngine, chain_plan(WHOLE)), (AgreeingEngine, chain_plan(BUSY)), (ChainEngine, AGAIN),
     (ChainEngine, SKIPPING)],
)  # fmt: skip
def test_the_text_is_that_without_drafts(engine, plans):
    assert generate(engine(), plans).texts == generate(engine(), {}).texts


KEY = "race(seeds, positions + level, ids)"
MUTANTS = [
    Mutant("one position for a whole branch", perturbed_topk, KEY, "race(seeds, positions, ids)", "whole chains"),
    Mutant("noise keyed by rank instead of token", perturbed_topk, KEY,
           "race(seeds, positions + level, torch.arange(most, device=ids.device).expand_as(ids))", "whole chains"),
    Mutant("noise keyed by the hot vocabulary's row instead of the target's id", perturbed_topk, KEY,
           "race(seeds, positions + level, 110 - ids)", "whole chains"),
    Mutant("noise of the first sequence for all", perturbed_topk, KEY,
           "race(seeds[:1].expand_as(seeds), positions + level, ids)", "whole chains"),
    Mutant("drafts at temperature 1", inputs._filter, "return config.divisor,", "return 1.0,", "whole chains"),
    Mutant("drafts without top-k", inputs._filter, "config.top_k or 0,", "0,", "whole chains"),
    Mutant("drafts without top-p", inputs._filter, "config.top_p or 1.0", "1.0",
           "whole chains"),
    Mutant("noise of the position before", inputs.next_noise, "[sampler.position for", "[sampler.position - 1 for",
           "after a budget of 0"),
    Mutant("noise of the draft before, re-sampled", inputs.next_noise, "[sampler.position for",
           "[sampler.position - 3 for", "after a skipped draft"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant):
    with planted(mutant):
        assert not CASES[mutant.case]().all_accepted
