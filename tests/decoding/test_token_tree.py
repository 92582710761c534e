"""Trees, packing and construction against plain tries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.batch import DraftCandidates
from redraft.decoding.construction import CONSTRUCTIONS, best_first, chain
from redraft.decoding.ngram import NgramIndex, count_bigrams, ngram_chains
from redraft.decoding.packing import dedup_prefix, pack_beams
from redraft.decoding.token_tree import (
    NodeDraws,
    TokenTree,
    join_trees,
    mask_width,
    mask_words,
    merge_trees,
    prune_tree,
    shared_budgets,
)


def paths(tree: TokenTree, sequence: int) -> set[tuple[int, ...]]:
    """All root-to-node paths of a tree, roots left out; also checks its shape."""
    found: list[tuple[int, ...]] = [()]
    (_, above, score), *nodes = tree.nodes[sequence]
    assert (above, score) == (-1, 0.0)
    for node, (token, parent, _) in enumerate(nodes, 1):
        assert 0 <= parent < node
        found.append((*found[parent], token))
    assert len(set(found)) == len(found), "a prefix stands in the tree twice"
    return set(found)


def trie(beams: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(beam[:length]) for beam in beams.tolist() for length in range(beams.shape[1] + 1)}


def random_beams(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 10)), int(rng.integers(1, 7)))
    return rng.integers(0, rng.integers(1, 5), shape).astype(np.int32)


def random_candidates(seed: int, batch: int = 3, length: int = 4, width: int = 3, per_node: int = 5) -> DraftCandidates:
    rng = np.random.default_rng(seed)
    shape = (batch, length, width)
    ids = np.zeros((*shape, per_node), np.int32)
    log_probs = np.full(ids.shape, -np.inf, np.float32)
    parents = np.zeros(shape, np.int32)
    for b in range(batch):
        scores = np.array([0.0] + [-np.inf] * (width - 1))
        for level in range(length):
            for w in range(width):
                ids[b, level, w] = rng.permutation(20)[:per_node]
                log_probs[b, level, w] = scores[w] + np.log(np.sort(rng.dirichlet(np.ones(per_node)))[::-1])
            best = np.argsort(-log_probs[b, level].ravel(), kind="stable")[:width]
            scores = log_probs[b, level].ravel()[best]
            if level + 1 < length:
                parents[b, level + 1] = best
    return DraftCandidates(ids, log_probs, parents)


def candidate_paths(drafts: DraftCandidates, b: int) -> dict[tuple[int, ...], float]:
    """Every candidate's path with its cumulative log-probability, by following parents one by one."""
    _, length, width, per_node = drafts.candidates.shape
    found = {}
    for level in range(length):
        for w in range(width):
            for k in range(per_node):
                score = float(drafts.log_probs[b, level, w, k])
                if np.isfinite(score):
                    tokens, node = [int(drafts.candidates[b, level, w, k])], w
                    for above in range(level, 0, -1):
                        node, choice = divmod(int(drafts.parents[b, above, node]), per_node)
                        tokens.insert(0, int(drafts.candidates[b, above - 1, node, choice]))
                    found[tuple(tokens)] = score
    return found


def test_the_papers_example():
    beams = np.array([[[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]], np.int32)
    assert dedup_prefix(beams).tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    tree = pack_beams(np.array([90], np.int32), beams)
    assert tree.tokens.tolist() == [90, 91, 92, 93, 95, 94, 96, 97]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 2, 5, 3]
    assert [path.bit_count() - 1 for path in tree.ancestors[0]] == [0, 1, 2, 3, 4, 3, 4, 4]
    masks = mask_words(tree.ancestors[0], 1)
    assert [f"{mask:08b}"[::-1] for mask in masks] == [
        "10000000", "11000000", "11100000", "11110000", "11111000", "11100100", "11100110", "11110001",
    ]  # fmt: skip


def test_thousands_of_random_beams_against_a_trie():
    for seed in range(3000):
        beams = random_beams(seed)
        roots = np.arange(len(beams), dtype=np.int32)
        tree = pack_beams(roots, beams)
        for b in range(len(beams)):
            assert paths(tree, b) == trie(beams[b])
        assert tree.tokens[tree.offsets[:-1]].tolist() == roots.tolist()


def test_beams_that_do_not_exist_have_no_nodes():
    """The second sequence has one beam; the last log-probability marks the others."""
    beams = np.array([[[5, 6], [5, 7], [8, 9]]] * 2, np.int32)
    log_probs = np.full(beams.shape, -1.0, np.float32)
    log_probs[1, 1:, -1] = -np.inf
    tree = pack_beams(np.array([1, 2], np.int32), beams, log_probs)
    assert tree.sizes.tolist() == [6, 3]
    assert paths(tree, 0) == trie(beams[0])
    assert paths(tree, 1) == trie(beams[1, :1])


@settings(max_examples=150)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_dedup_prefix_property(width, length, data):
    beam = np.array(data.draw(st.lists(st.lists(st.integers(0, 2), min_size=length, max_size=length),
                                       min_size=width, max_size=width)), np.int32)  # fmt: skip
    got = dedup_prefix(beam[None])[0]
    for i in range(width):
        for k in range(length):
            same = [j for j in range(width) if (beam[j, : k + 1] == beam[i, : k + 1]).all()]
            assert got[i, k] == same[0]


def test_merging_chains_is_packing_beams():
    for seed in range(300):
        beams = random_beams(seed)
        batch, width, length = beams.shape
        roots = np.full(batch, 7, np.int32)
        chains = [
            TokenTree.from_nodes(
                [[(7, -1, 0.0), *((int(beams[b, w, k]), k, 0.0) for k in range(length))] for b in range(batch)]
            )
            for w in range(width)
        ]
        merged, packed = merge_trees(chains), pack_beams(roots, beams)
        assert (merged.tokens == packed.tokens).all()
        assert (merged.parents == packed.parents).all()


def test_merge_keeps_the_better_score_and_refuses_other_roots():
    left = TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -3.0)]])
    right = TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -1.0), (3, 1, -2.0)]])
    merged = merge_trees([left, right])
    assert merged.nodes == [[(1, -1, 0.0), (2, 0, -1.0), (3, 1, -2.0)]]
    with pytest.raises(ValueError, match="same roots"):
        merge_trees([left, TokenTree.root_only(np.array([5]))])


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 100])
def test_best_first_is_the_most_probable_candidates(budget):
    for seed in range(50):
        drafts = random_candidates(seed)
        tree = best_first(drafts, np.zeros(3, np.int32), budget)
        for b in range(3):
            ranked = sorted(candidate_paths(drafts, b).items(), key=lambda item: -item[1])[:budget]
            assert paths(tree, b) - {()} == {path for path, _ in ranked}


def test_best_first_with_equal_probabilities_keeps_parents():
    drafts = random_candidates(0)
    drafts.log_probs[np.isfinite(drafts.log_probs)] = 0.0
    for budget in range(1, 30):
        tree = best_first(drafts, np.zeros(3, np.int32), budget)
        assert all(len(paths(tree, b)) == budget + 1 for b in range(3))


def test_beam_and_chain_are_the_best_full_paths():
    for seed in range(50):
        drafts = random_candidates(seed)
        roots = np.arange(3, dtype=np.int32)
        beam_tree, chain_tree = CONSTRUCTIONS["beam"].build(drafts, roots, 99), chain(drafts, roots, 99)
        for b in range(3):
            full = [(path, score) for path, score in candidate_paths(drafts, b).items() if len(path) == 4]
            best = [path for path, _ in sorted(full, key=lambda item: -item[1])[:3]]
            assert paths(beam_tree, b) == trie(np.array(best))
            assert paths(chain_tree, b) == trie(np.array(best[:1]))


def test_prune_keeps_the_best_closed_under_parents_and_cuts_depth():
    for seed in range(50):
        tree = best_first(random_candidates(seed), np.zeros(3, np.int32), 20)
        pruned = prune_tree(tree, np.array([5, 0, 20]), np.array([4, 4, 2]))
        assert pruned.sizes[:2].tolist() == [6, 1]
        assert paths(pruned, 0) == paths(best_first(random_candidates(seed), np.zeros(3, np.int32), 5), 0)
        assert paths(pruned, 2) == {path for path in paths(tree, 2) if len(path) <= 2}


def test_prune_leaves_out_unlikely_nodes_and_what_is_below_them():
    forked = [(0, -1, 0.0), (1, 0, -2.0), (2, 1, -0.5), (3, 0, -1.0)]
    tree = TokenTree.from_nodes([forked, [(0, -1, 0.0), (1, 0, -9.0)]])
    pruned = prune_tree(tree, [9, 9], least=[-1.5, -10.0])
    assert pruned.nodes == [[(0, -1, 0.0), (3, 0, -1.0)], tree.nodes[1]]


def test_a_batch_shares_its_rows_by_score():
    trees = [[(0, -1, 0.0), (1, 0, -0.1), (2, 1, -0.2)], [(0, -1, 0.0)], [(0, -1, 0.0), (1, 0, -0.15), (2, 0, -3.0)]]
    tree = TokenTree.from_nodes(trees)
    assert [shared_budgets(tree, total) for total in (0, 1, 2, 3, 9)] == [
        [0, 0, 0], [1, 0, 0], [1, 0, 1], [2, 0, 1], [2, 0, 2],
    ]  # fmt: skip
    for seed in range(50):
        tree = best_first(random_candidates(seed), np.zeros(3, np.int32), 20)
        pruned = prune_tree(tree, shared_budgets(tree, 25))
        assert pruned.sizes.sum() == 28
        assert np.sort(pruned.scores).tolist() == np.sort(tree.scores)[-28:].tolist()


def test_groups_of_a_batch_are_joined_in_its_order():
    nodes = [[(b, -1, 0.0), *((node, node - 1, -0.5) for node in range(1, b + 1))] for b in range(6)]
    groups = [[1, 4], [0, 5], [2, 3]]
    trees = [TokenTree.from_nodes([nodes[b] for b in group]) for group in groups]
    joined = join_trees(list(zip(groups, trees, strict=True)))
    assert joined.nodes == nodes
    assert joined.draws is None
    drawn = [{0: NodeDraws([b], [0], np.zeros(1, np.int32), np.zeros(1, np.float32))} for b in range(6)]
    trees[0].draws, trees[2].draws = [drawn[1], drawn[4]], [drawn[2], drawn[3]]
    assert join_trees(list(zip(groups, trees, strict=True))).draws == [{}, *drawn[1:5], {}]


def test_lists_and_arrays_are_the_same_trees():
    nodes = [[(7, -1, 0.0), (1, 0, -0.5), (2, 1, -1.5)], [(8, -1, 0.0)], [(9, -1, 0.0), (3, 0, -0.1)]]
    listed = TokenTree.from_nodes(nodes)
    tree = TokenTree(listed.offsets, listed.tokens, listed.parents, listed.scores)
    assert tree.nodes == nodes
    assert len(tree) == 3
    assert tree.sizes.tolist() == [3, 1, 2]
    assert tree.of([0, 2]).nodes == [nodes[0], nodes[2]]
    assert TokenTree.root_only([7, 8]).nodes == [[(7, -1, 0.0)], [(8, -1, 0.0)]]
    written = TokenTree.root_only([7, 8])
    for array in (written.offsets, written.parents, written.scores):
        array += 1
    assert TokenTree.root_only([7, 8]).nodes == [[(7, -1, 0.0)], [(8, -1, 0.0)]], "trees share no arrays"


def test_a_mask_has_a_bit_for_each_row():
    assert [mask_width(rows) for rows in (1, 32, 33, 64, 70)] == [1, 1, 2, 2, 3]


def test_ancestors_and_mask_words_of_random_trees():
    rng = np.random.default_rng(1)
    nodes = [[(0, -1, 0.0), *((i, int(rng.integers(0, i)), 0.0) for i in range(1, n))] for n in (70, 1, 33)]
    tree = TokenTree.from_nodes(nodes)
    for b, listed in enumerate(nodes):
        words = mask_words(tree.ancestors[b], 3)
        for node in range(len(listed)):
            expected, at = {node}, node
            while listed[at][1] >= 0:
                at = listed[at][1]
                expected.add(at)
            bits = {j for j in range(96) if words[3 * node + j // 32] >> j % 32 & 1}
            assert bits == expected
            assert tree.ancestors[b][node] == sum(1 << j for j in expected)
    with pytest.raises(ValueError, match="70 tree nodes do not fit 2 mask words"):
        mask_words(tree.ancestors[0], 2)


def test_ngram_lookup_prefers_the_longest_and_latest_match():
    index = NgramIndex([1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3])
    assert [token for token, _ in index.draft(1)] == [5]
    index.extend([5])
    assert [token for token, _ in index.draft(3)] == [9, 2, 3]
    assert NgramIndex([1, 2]).draft(4) == []
    table = np.array([-1, 2, 0], np.int32)
    assert [token for token, _ in NgramIndex([1], table).draft(4)] == [2, 0]
    scores = [score for _, score in index.draft(3)]
    assert scores == sorted(scores, reverse=True)


def test_ngram_index_grows_like_one_built_at_once():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 200).tolist()
    grown = NgramIndex(tokens[:50])
    for token in tokens[50:]:
        grown.extend([token])
    assert grown.draft(8) == NgramIndex(tokens).draft(8)
    assert ngram_chains(np.array(tokens[-1:], np.int32), [grown], [1.0], 8).sizes[0] == 9


def test_count_bigrams():
    table = count_bigrams([np.array([1, 2, 1, 2, 1, 3]), np.array([0]), np.array([4, 4, 4])], vocab_size=6)
    assert table.tolist() == [-1, 2, 1, -1, 4, -1]
