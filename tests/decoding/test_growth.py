"""Trees that a drafter and n-grams grow together, against enumeration of all their paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.batch import DraftCandidates
from redraft.decoding.construction import best_first
from redraft.decoding.defaults import HIDDEN_SHARE, JOINT_ODDS, NGRAM_CHANCES
from redraft.decoding.growth import LEAST, MOST, grow_trees, joint_odds
from redraft.decoding.ngram import LONGEST, NgramIndex, ngram_chains
from redraft.decoding.token_tree import Node, TokenTree
from tests.decoding.test_token_tree import candidate_paths, paths, random_candidates
from tests.grammar.test_state import tokens
from tests.grammar.tokens import CODEC, grammar

ROOTS = np.zeros(3, np.int32)


def scored_paths(tree: TokenTree, b: int) -> dict[tuple[int, ...], float]:
    """Every drafted node's path and score."""
    found: list[tuple[int, ...]] = [()]
    for token, parent, _ in tree.nodes[b][1:]:
        found.append((*found[parent], token))
    return {path: node[2] for path, node in zip(found[1:], tree.nodes[b][1:], strict=True)}


def one_level(tokens: list[int], chances: list[float]) -> DraftCandidates:
    return DraftCandidates(
        np.array(tokens, np.int32).reshape(1, 1, 1, -1),
        np.log(np.array(chances, np.float32)).reshape(1, 1, 1, -1),
        np.zeros((1, 1, 1), np.int32),
    )


@pytest.mark.parametrize("budget", [1, 4, 13])
def test_without_ngrams_it_is_best_first(budget):
    for seed in range(50):
        drafts = random_candidates(seed)
        grown = grow_trees(
            drafts, ROOTS, budget, [NgramIndex([0]) for _ in ROOTS], [1.0] * len(ROOTS), JOINT_ODDS[False]
        )
        expected = best_first(drafts, ROOTS, budget)
        for b in range(3):
            worth = {path: score for path, score in scored_paths(expected, b).items() if score > math.log(LEAST)}
            assert scored_paths(grown, b) == pytest.approx(worth, abs=1e-4)


def test_where_both_guess_the_chances_are_joined():
    """2, 3 and then 7 came before: matched 2, once."""
    index, drafts = NgramIndex([2, 3, 7, 5, 2, 3]), one_level([4, 7, 9], [0.5, 0.3, 0.1])
    (tree,) = grow_trees(drafts, np.array([3], np.int32), 9, [index], [1.0], JOINT_ODDS[False]).nodes
    odds = joint_odds(NGRAM_CHANCES[2][0], 0.3, JOINT_ODDS[False])
    found = {token: math.exp(score) for token, parent, score in tree[1:] if parent == 0}
    assert found[7] == pytest.approx(odds / (1 + odds), rel=1e-5)
    assert found[7] > 0.6
    assert found[4] / found[9] == pytest.approx(5, rel=1e-5)
    assert found[4] + found[9] == pytest.approx(0.6 / 0.7 * (1 - found[7]), rel=1e-5)


@given(st.floats(0.01, 0.99), st.floats(0, 0.99))
def test_ngrams_add_less_to_a_drafter_that_reads_the_context(ngram, neural):
    """Nothing said by one of the two, the other is believed, n-grams less than alone."""
    knowing, other = joint_odds(ngram, neural, JOINT_ODDS[True]), joint_odds(ngram, neural, JOINT_ODDS[False])
    assert neural / (1 - neural) < knowing < other
    assert joint_odds(ngram, 0.0, JOINT_ODDS[False]) < ngram / (1 - ngram)


def test_a_guess_that_the_drafter_lacks_takes_its_share():
    index, drafts = NgramIndex([2, 3, 7, 5, 2, 3]), one_level([4, 9], [0.5, 0.1])
    (tree,) = grow_trees(drafts, np.array([3], np.int32), 9, [index], [1.0], JOINT_ODDS[False]).nodes
    found = {token: math.exp(score) for token, parent, score in tree[1:] if parent == 0}
    assert 0.2 < found[7] < NGRAM_CHANCES[2][0]
    assert found[4] == pytest.approx(0.5 * (1 - found[7]), rel=1e-5)


def test_ngrams_go_on_where_the_drafter_ends():
    """Also below tokens that n-grams did not guess."""
    index, drafts = NgramIndex([4, 6, 8, 1, 2, 3]), one_level([4, 9], [0.8, 0.1])
    tree = grow_trees(drafts, np.array([3], np.int32), 9, [index], [1.0], JOINT_ODDS[False])
    assert {(4,), (9,), (4, 6), (4, 6, 8)} <= paths(tree, 0)


def test_a_drafter_that_is_sure_of_the_guess():
    index, drafts = NgramIndex([3, 4, 5, 3]), one_level([4, 9], [1.0, 1e-9])
    (tree,) = grow_trees(drafts, np.array([3], np.int32), 9, [index], [1.0], JOINT_ODDS[False]).nodes
    assert [(token, math.exp(score)) for token, parent, score in tree if parent == 0] == [(4, pytest.approx(1))]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 31), st.lists(st.integers(0, 5), min_size=1, max_size=40), st.booleans())
def test_trees_are_closed_and_ranked(seed, budget, history, reads_context):
    """Parents first, best first, siblings' chances at most one, only candidates and n-grams as tokens."""
    drafts = random_candidates(seed)
    indices = [NgramIndex(history) for _ in ROOTS]
    tree = grow_trees(
        drafts, np.full(3, history[-1], np.int32), budget, indices, [1.0] * len(indices), JOINT_ODDS[reads_context]
    )
    for b, nodes in enumerate(tree.nodes):
        paths(tree, b)
        assert len(nodes) <= budget + 1
        scores = [score for _, _, score in nodes]
        assert scores == sorted(scores, reverse=True)
        below = np.zeros(len(nodes))
        np.add.at(below, [parent for _, parent, _ in nodes[1:]], np.exp(scores[1:]))
        assert (below <= np.exp(scores) * (1 + 1e-4)).all()
        drafted = {path[-1] for path in candidate_paths(drafts, b)} | set(history)
        assert {token for token, _, _ in nodes[1:]} <= drafted


def test_a_guess_that_the_drafter_rules_out_stands_once():
    drafts = one_level([4, 7], [0.5, 0.5])
    drafts.log_probs[..., 1] = -np.inf
    (tree,) = grow_trees(
        drafts, np.array([3], np.int32), 9, [NgramIndex([2, 3, 7, 5, 2, 3])], [1.0], JOINT_ODDS[False]
    ).nodes
    assert sorted(token for token, parent, _ in tree if parent == 0) == [4, 7]


def test_ngrams_go_on_below_a_guess_that_the_drafter_rules_out_and_expands():
    drafts = DraftCandidates(
        np.array([4, 7, 0, 0, 5, 6, 9, 8], np.int32).reshape(1, 2, 2, 2),
        np.array([-0.1, *[-np.inf] * 3, -0.2, *[-np.inf] * 3], np.float32).reshape(1, 2, 2, 2),
        np.array([0, 0, 0, 1], np.int32).reshape(1, 2, 2),
    )
    tree = grow_trees(drafts, np.array([3], np.int32), 9, [NgramIndex([2, 3, 7, 9, 2, 3])], [1.0], JOINT_ODDS[False])
    assert {(4,), (4, 5), (7,), (7, 9)} <= paths(tree, 0)


def grown_by_hand(
    drafts: DraftCandidates, b: int, root: int, budget: int, index: NgramIndex, reads_context: bool
) -> list[Node]:
    """The same tree from arrays of all chances, with the best of all offers sought anew for every node."""
    length, expanded, per_node = drafts.candidates.shape[1:]
    logs = drafts.log_probs[b].reshape(length, -1)
    above = np.zeros((length, expanded, 1))
    above[1:, :, 0] = np.take_along_axis(logs[:-1], drafts.parents[b, 1:], axis=1)
    with np.errstate(invalid="ignore"):
        chances = np.fmax(np.vectorize(math.exp)(drafts.log_probs[b] - above), 0)
    nodes: list[Node] = []
    texts: list[tuple[int, ...]] = []
    offers = [(-1.0, -1, root, 0, 0)]
    while offers and len(nodes) <= budget:
        best = min(offers)
        offers.remove(best)
        negative, parent, token, level, flat = best
        texts.append((*texts[parent], token) if nodes else index.tail)
        node = len(nodes)
        nodes.append((token, parent, math.log(-negative)))
        beams = [0] if level == 0 else drafts.parents[b, level].tolist() if level < length else []
        beam = beams.index(flat) if flat in beams else None
        own = [] if beam is None else zip(drafts.candidates[b, level, beam], chances[level, beam], strict=True)
        below = [(int(token), float(chance), beam * per_node + k) for k, (token, chance) in enumerate(own)]
        if seen := index.seen(texts[node][-LONGEST:]):
            guess, ngram = seen
            neural = min(next((chance for token, chance, _ in below if token == guess), 0.0), MOST)
            odds = joint_odds(ngram, neural, JOINT_ODDS[reads_context]) if below else ngram / (1 - ngram)
            joint, left = odds / (1 + odds) if below else ngram, 1 / (1 + odds) / (1 - neural)
            known = any(token == guess for token, _, _ in below)
            below = [(token, joint if token == guess else chance * left, k) for token, chance, k in below]
            below += [] if known else [(guess, joint, -1)]
        offers += [
            (negative * chance, node, token, level + 1, k) for token, chance, k in below if chance > LEAST / -negative
        ]
    return nodes


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(0, 31),
    st.floats(0, 0.7),
    st.lists(st.integers(0, 19), min_size=1, max_size=60),
    st.booleans(),
)
def test_trees_are_those_grown_by_hand(seed, budget, absent, history, reads_context):
    """To the last bit, also where candidates, expanded ones among them, are absent, and where two beams are of one."""
    drafts, rng = random_candidates(seed), np.random.default_rng(seed)
    drafts.log_probs[rng.random(drafts.log_probs.shape) < absent] = -np.inf
    drafts.parents[:, :, 1][rng.random((3, 4)) < absent / 2] = 0
    for level in range(1, 4):
        above = np.take_along_axis(drafts.log_probs[:, level - 1].reshape(3, -1), drafts.parents[:, level], axis=1)
        drafts.log_probs[:, level][np.isneginf(above)] = -np.inf
    drafts.parents[:, 0] = 7
    roots = rng.integers(0, 20, 3, np.int32)
    indices = [NgramIndex([*history[b:], int(root)]) for b, root in enumerate(roots)]
    grown = grow_trees(drafts, roots, budget, indices, [1.0] * len(indices), JOINT_ODDS[reads_context]).nodes
    by_hand = [grown_by_hand(drafts, b, int(roots[b]), budget, indices[b], reads_context) for b in range(3)]
    assert grown == by_hand


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.5])
def test_guesses_grow_by_their_odds(factor):
    """Below the drafter's level, and in chains."""
    index, drafts, root = NgramIndex([2, 3, 4, 5, 6, 2, 3]), one_level([9, 4], [0.5, 0.4]), np.array([3], np.int32)
    grown = scored_paths(grow_trees(drafts, root, 9, [index], [factor], JOINT_ODDS[False]), 0)
    odds = factor * NGRAM_CHANCES[3][0] / (1 - NGRAM_CHANCES[3][0])
    assert math.exp(grown[4, 5] - grown[4,]) == pytest.approx(odds / (1 + odds), rel=1e-6)
    (chain,) = ngram_chains(root, [index], [factor], 2).nodes
    first = factor * NGRAM_CHANCES[2][0] / (1 - NGRAM_CHANCES[2][0])
    assert [math.exp(score) for _, _, score in chain[1:]] == pytest.approx(
        [first / (1 + first), first / (1 + first) * odds / (1 + odds)]
    )


def chances(tree: TokenTree, b: int) -> dict[str, float]:
    """By the text of its path, each drafted node's chance."""
    return {CODEC.decode(list(path)): math.exp(score) for path, score in scored_paths(tree, b).items()}


def test_only_what_a_grammar_allows_grows():
    """With the chances that the drafter gives it among what is allowed; only one of the trees has a grammar."""
    roots, drafts = np.array([5, 5], np.int32), one_level(list(tokens("b", "n", "y")), [0.5, 0.2, 0.1])
    both = DraftCandidates(*(np.repeat(array, 2, axis=0) for array in vars(drafts).values() if array is not None))
    indices = [NgramIndex([5]) for _ in roots]
    tree = grow_trees(both, roots, 3, indices, [1.0, 1.0], JOINT_ODDS[False], [grammar("choice").start([0]), None])
    allowed = 0.3 + HIDDEN_SHARE * (0.5 + 0.2)
    assert chances(tree, 0) == pytest.approx({t: p / allowed for t, p in (("n", 0.2), ("no", 0.2), ("y", 0.1))})
    assert chances(tree, 1) == pytest.approx({"b": 0.5, "n": 0.2, "y": 0.1}, rel=1e-5)


def test_what_a_grammar_forces_is_certain_and_ngrams_go_on_after_it():
    """The drafter knows the first forced token only, and the second one's place has another candidate."""
    forced = grammar("schema").start([0]).forced()
    history = [*forced, *tokens("b", "o"), 5]
    levels = np.array([[forced[0], 7], [7, 8]], np.int32).reshape(1, 2, 1, 2)
    drafts = DraftCandidates(levels, np.log(np.full(levels.shape, 0.1, np.float32)), np.zeros((1, 2, 1), np.int32))
    state = grammar("schema").start([0])
    tree = grow_trees(drafts, np.array([5], np.int32), 9, [NgramIndex(history)], [1.0], JOINT_ODDS[False], [state])
    grown = scored_paths(tree, 0)
    assert [grown[tuple(forced[:place])] for place in range(1, len(forced) + 1)] == [0.0] * len(forced)
    assert math.log(0.5) < grown[*forced, *tokens("b")] < 0
    assert all(path[: len(forced)] == tuple(forced[: len(path)]) for path in grown)


def test_nothing_grows_after_the_end_of_a_guided_text():
    state, drafts = grammar("choice").start([0]), one_level(list(tokens("y")), [0.9])
    tree = grow_trees(drafts, np.array([5], np.int32), 9, [NgramIndex([5, 7])], [1.0], JOINT_ODDS[False], [state])
    assert list(chances(tree, 0)) == ["y", "ye", "yes"], "it ends without an end token"
