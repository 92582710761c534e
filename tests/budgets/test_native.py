"""The compiled choice against the Python function that it repeats: the same nodes, the same bits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.budgets import choice, native
from redraft.budgets.cost import TimesByNodes, TimeTable
from tests.compiled_trees import EXAMPLES, forests, in_arrays, run_mutant, run_sanitized

SECONDS = st.floats(1e-4, 10.0)


@st.composite
def times(draw: st.DrawFn) -> TimesByNodes:
    """Tables of one count or several, with cliffs, counts that cost less than fewer, and steps before their first and
    after their last count."""
    rows = sorted(draw(st.sets(st.integers(1, 150), min_size=1, max_size=8)))
    seconds = draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows)))
    table = TimeTable(sequences=8, rows=rows, seconds=seconds, padded=draw(st.booleans()))
    return TimesByNodes(table, draw(st.integers(1, 200)), draw(st.floats(0.2, 5.0)), draw(st.floats(0.0, 0.5)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests(), times(), st.floats(1.0, 50.0), st.booleans(), st.data())
def test_nodes_are_chosen_alike(tree, times, tokens, probes, data):
    ratios = data.draw(st.lists(st.sampled_from([0.02, 0.5, 0.77, 1.5]), min_size=len(tree), max_size=len(tree)))
    chosen = native.choose_nodes(in_arrays(tree), ratios, tokens, times, probes)
    assert chosen == choice.choose_nodes(tree, ratios, tokens, times, probes)


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests())
def test_promises_are_summed_alike(tree):
    assert native.promised_nodes(in_arrays(tree)) == choice.promised_nodes(tree)


@given(forests())
def test_ratios_of_other_trees_are_refused(tree):
    table = TimeTable(sequences=1, rows=[1], seconds=[1.0], padded=False)
    with pytest.raises(ValueError, match="ratios"):
        native.choose_nodes(tree, [1.0] * (len(tree) + 1), 1.0, TimesByNodes(table, 1, 1.0, 0.0), False)


@pytest.mark.slow
def test_no_choice_leads_outside_the_arrays(tmp_path):
    """The same properties under the address and undefined-behaviour sanitizers."""
    done = run_sanitized(tmp_path, __file__, "alike or refused")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MUTANTS = {
    "a node fewer's time": ("choice.h", "expected / seconds[index + 1]", "expected / seconds[index]"),
    "equal nodes by the later one": ("choice.h", "position < other.position", "position > other.position"),
    "times that may fall": (
        "choice.h",
        "high = std::max(high, table_seconds[++above])",
        "high = table_seconds[++above]",
    ),
    "a chance above 1": ("choice.h", "std::min(score * ratios[b], 1.0)", "score * ratios[b]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_compiled_code_is_found(mutant, tmp_path):
    assert run_mutant(tmp_path, *MUTANTS[mutant], __file__, "alike").returncode == 1
