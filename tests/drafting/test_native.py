"""The compiled way from a drafter's candidates to the nodes that are verified against the Python functions that it
repeats: the same nodes, the same bits.

It would catch a compiled step that ranks, breaks ties, rounds, chooses or cuts in another way than the algorithm that
is read.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.batch import DraftCandidates
from redraft.budgets.choice import Terms
from redraft.budgets.cost import TimesByNodes, TimeTable
from redraft.decoding import construction, growth
from redraft.decoding.defaults import JOINT_ODDS, NGRAM_CHANCES
from redraft.decoding.native import NativeNgrams, NativeTextStore
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.text_store import TextStore
from redraft.decoding.token_tree import TokenTree
from redraft.drafting import cutting, native
from redraft.drafting.cutting import TreeLimits
from tests.compiled_trees import EXAMPLES, TOKENS, forests, in_arrays, run_mutant, run_sanitized

FITTED = {length: tuple(0.9 * chance for chance in chances) for length, chances in NGRAM_CHANCES.items()}
HISTORIES = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=60)
SECONDS = st.floats(1e-4, 10.0)
PLAIN_GROWTH = native.Growth((1.0, 1.0), NGRAM_CHANCES)


@st.composite
def searches(draw: st.DrawFn, batch: int = 3) -> DraftCandidates:
    """Candidates of odd sizes, with ties, absent ones, nodes that are expanded twice or not at all, and tokens that
    stand twice."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels, width, per_node = (draw(st.integers(1, most)) for most in (4, 3, 5))
    shape = batch, levels, width, per_node
    steps = rng.choice(draw(st.sampled_from([[0.0, 0.5, 1.0], [0.01, 0.3, 2.0, 9.0]])), shape)
    parents = rng.integers(0, width * per_node, shape[:3]).astype(np.int32)
    log_probs = np.zeros(shape)
    log_probs[:, 0, 1:] = -np.inf
    for level in range(levels):
        if level:
            above = np.take_along_axis(log_probs[:, level - 1].reshape(batch, -1), parents[:, level], axis=1)
            log_probs[:, level] = above[..., None]
        log_probs[:, level] -= steps[:, level]
    log_probs[rng.random(shape) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    return DraftCandidates(rng.integers(0, TOKENS, shape).astype(np.int32), log_probs.astype(np.float32), parents)


@st.composite
def limits(draw: st.DrawFn, count: int) -> TreeLimits:
    """Limits that cut nothing, and such that leave only roots."""

    def each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=count, max_size=count))

    scores = each(st.sampled_from([-np.inf, -0.5, -3.0]))
    return TreeLimits(each(st.integers(0, 45)), each(st.integers(0, 50)), scores, 45, draw(st.integers(0, 45)))


@st.composite
def terms(draw: st.DrawFn, count: int) -> Terms:
    """Tables of one count or several, with cliffs, counts that cost less than fewer, and steps before their first and
    after their last count."""
    rows = sorted(draw(st.sets(st.integers(1, 150), min_size=1, max_size=8)))
    seconds = draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows)))
    table = TimeTable(sequences=8, rows=rows, seconds=seconds, padded=draw(st.booleans()))
    times = TimesByNodes(table, draw(st.integers(1, 200)), draw(st.floats(0.2, 5.0)), draw(st.floats(0.0, 0.5)))
    ratios = draw(st.lists(st.sampled_from([0.02, 0.5, 0.77, 1.5]), min_size=count, max_size=count))
    return Terms(ratios, draw(st.floats(1.0, 50.0)), times, draw(st.booleans()))


def same(drafted: tuple, expected: tuple) -> bool:
    """Whether trees, what they promise and what was chosen are the same."""
    (tree, choice), (other, other_choice) = drafted, expected
    return (tree.nodes, tree.promises, choice) == (other.nodes, other.promises, other_choice)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    searches(),
    st.integers(0, 40),
    st.lists(HISTORIES, min_size=3, max_size=3),
    st.sampled_from([*JOINT_ODDS.values(), (0.7, 0.0)]),
    st.sampled_from([NGRAM_CHANCES, FITTED]),
    st.data(),
)
def test_trees_are_grown_and_cut_alike(drafts, budget, histories, joint, chances, data):
    """With n-grams that were told more since the last trees; whole, cut to limits, and to what was chosen."""
    odds = data.draw(st.lists(st.sampled_from([1.0, 0.4, 3.0]), min_size=3, max_size=3))
    scopes = data.draw(st.lists(st.sampled_from([0, 1, 2**63 + 1]), min_size=3, max_size=3))
    stores = NativeTextStore(111, 7), TextStore(111, 7)
    served = data.draw(st.lists(st.tuples(st.sampled_from(scopes), HISTORIES), max_size=4))
    for store in stores:
        for scope, text in served:
            store.add(scope, [*histories[0], *text])  # a long match, likelier than any own one
    bounds, chosen_by = data.draw(limits(3)), data.draw(terms(3))
    roots = np.array([history[-1] for history in histories], np.int32)
    sources, least = [*zip(histories, scopes, strict=True)], data.draw(st.sampled_from([1, 3]))
    ngrams = native.Ngrams(
        [NativeNgrams(text, None, chances, stores[0], scope, least) for text, scope in sources],
        odds,
        native.Growth(joint, chances),
    )
    plain = [NgramIndex(text, None, chances, stores[1], scope, least) for text, scope in sources]
    for _ in range(2):
        grown = growth.grow_trees(drafts, roots, budget, plain, odds, joint)
        assert same(native.draft_trees(drafts, roots, budget, ngrams), (grown, None))
        for by in (None, chosen_by):
            cut = native.draft_trees(drafts, roots, budget, ngrams, bounds, by)
            assert same(cut, cutting.cut_trees(grown, bounds, by))
        for index, other, more in zip(ngrams.indices, plain, histories, strict=True):
            index.extend(more[:3])
            other.extend(more[:3])
    assert stores[0].counts == stores[1].counts


@settings(max_examples=EXAMPLES, deadline=None)
@given(searches(), st.integers(0, 70), limits(3), terms(3))
def test_the_best_candidates_are_chosen_and_cut_alike(drafts, budget, bounds, chosen_by):
    drafts.parents[:, 1:] %= drafts.candidates.shape[3]  # children of a node that may itself be absent
    roots = np.arange(3, dtype=np.int32)
    try:
        expected = construction.best_first(drafts, roots, budget)
    except KeyError:  # a candidate without its parent, which no search gives
        with pytest.raises(ValueError, match="parent"):
            native.draft_trees(drafts, roots, budget)
        return
    assert same(native.draft_trees(drafts, roots, budget), (expected, None))
    for by in (None, chosen_by):
        cut = native.draft_trees(drafts, roots, budget, None, bounds, by)
        assert same(cut, cutting.cut_trees(expected, bounds, by))


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests(), st.data())
def test_trees_are_cut_alike(tree, data):
    bounds, chosen_by = data.draw(limits(len(tree))), data.draw(terms(len(tree)))
    for by in (None, chosen_by):
        assert same(native.cut_trees(in_arrays(tree), bounds, by), cutting.cut_trees(tree, bounds, by))


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests(), st.data())
def test_nodes_are_chosen_and_shared_alike_where_nothing_else_is_cut(tree, data):
    """Scores above their parents' stay as they are."""
    count = len(tree)
    bounds = TreeLimits([45] * count, [45] * count, [-math.inf] * count, 45, 45)
    shared = TreeLimits(data.draw(limits(count)).nodes, [45] * count, [-math.inf] * count, 45, 45)
    for limit, by in ((bounds, data.draw(terms(count))), (shared, None)):
        assert same(native.cut_trees(in_arrays(tree), limit, by), cutting.cut_trees(tree, limit, by))


def test_of_equal_nodes_the_first_is_chosen_alike():
    """Where one more than the roots costs nothing, and two cost much."""
    tree = TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.5)]] * 3)
    table = TimeTable(sequences=3, rows=[4, 9], seconds=[0.01, 1.0], padded=True)
    bounds = TreeLimits([9] * 3, [9] * 3, [-math.inf] * 3, 9, 9)
    by = Terms([1.0] * 3, 3.0, TimesByNodes(table, 3, 1.0, 0.0), False)
    cut, choice = native.cut_trees(in_arrays(tree), bounds, by)
    assert same((cut, choice), cutting.cut_trees(tree, bounds, by))
    assert choice.counts == [1, 0, 0]


def test_columns_of_another_length_are_refused():
    tree = in_arrays(TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.5)]] * 3))
    drafts = DraftCandidates(
        np.zeros((2, 1, 1, 4), np.int32), np.zeros((2, 1, 1, 4), np.float32), np.zeros((2, 1, 1), np.int32)
    )
    roots, three, two = np.zeros(3, np.int32), [1] * 3, [1] * 2
    times = TimesByNodes(TimeTable(sequences=1, rows=[1], seconds=[1.0], padded=False), 1, 1.0, 0.0)
    whole = TreeLimits(three, three, [0.0] * 3, 1, 1)
    for wrong in (
        lambda: native.cut_trees(tree, TreeLimits(two, three, [0.0] * 3, 1, 1), Terms([1.0] * 3, 1.0, times, False)),
        lambda: native.cut_trees(tree, TreeLimits(three, two, [0.0] * 3, 1, 1), None),
        lambda: native.cut_trees(tree, TreeLimits(three, three, [0.0] * 2, 1, 1), None),
        lambda: native.cut_trees(tree, whole, Terms([1.0] * 2, 1.0, times, False)),
        lambda: native.draft_trees(drafts, roots, 3),
        lambda: native.draft_trees(drafts, roots[:2], 3, native.Ngrams([NativeNgrams()], [1.0] * 2, PLAIN_GROWTH)),
        lambda: native.draft_trees(drafts, roots[:2], 3, native.Ngrams([NativeNgrams()] * 2, [1.0], PLAIN_GROWTH)),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def test_candidates_of_another_type_are_converted():
    ids, log_probs = np.arange(8).reshape(1, 1, 1, 8)[..., ::-1], np.log(np.linspace(0.3, 0.1, 8)).reshape(1, 1, 1, 8)
    drafts = DraftCandidates(ids, log_probs, np.zeros((1, 1, 1), np.int64))
    expected = DraftCandidates(ids.astype(np.int32), log_probs.astype(np.float32), drafts.parents)
    roots = np.zeros(1, np.int32)
    tree, _ = native.draft_trees(drafts, roots, 3)
    assert tree.nodes == construction.best_first(expected, roots, 3).nodes


def test_arrays_that_may_only_be_read_are_passed():
    tree = in_arrays(TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.5), (3, 0, -1.0)]]))
    for column in (tree.offsets, tree.tokens, tree.parents, tree.scores):
        column.flags.writeable = False
    cut, _ = native.cut_trees(tree, TreeLimits([1], [9], [-math.inf], 9, 9), None)
    assert cut.nodes == [[(1, -1, 0.0), (2, 0, -0.5)]]


@pytest.mark.slow
def test_no_tree_leads_outside_the_arrays(tmp_path):
    """The same properties under the address and undefined-behaviour sanitizers."""
    done = run_sanitized(tmp_path, __file__, "alike or refused")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MUTANTS = {
    "ties by the later node": ("shape.h", "scores_[a] > scores_[c] : a < c", "scores_[a] > scores_[c] : a > c"),
    "a candidate's chance with its parent's": ("growth.h", "logs[k]) - above.above)", "logs[k]))"),
    "nodes shared before they are cut": ("draft.h", "share_nodes(left", "share_nodes(trees"),
    "a node fewer's time": ("choice.h", "expected / seconds_[index + 1]", "expected / seconds_[index]"),
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
