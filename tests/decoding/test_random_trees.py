"""Random trees: shapes, cuts in draw order, and packing, against the draws themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.batch import DraftDraws, DraftSampling
from redraft.decoding.draws import gumbel_noise
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, pack_draws
from redraft.decoding.rejection import k_seq, multi_round
from tests.decoding.laws import law
from tests.decoding.test_token_tree import paths
from tests.toy_drafter import reference_draws

SHAPES = {
    "gumbel_top_k": [(3, 2, 1), (2, 2, 2), (4,), (1, 3)],
    "stochastic_beam": [(3, 3, 3), (4, 2), (1, 2, 4)],
    "independent": [(3, 3, 3), (5,)],
    "random_chain": [(1, 1, 1, 1)],
}
CASES = [(name, levels) for name, all_levels in SHAPES.items() for levels in all_levels]
BATCH, SUPPORT = 3, 4


def some_draws(name: str, levels: tuple[int, ...], seed: int, temperature: float = 1.0) -> DraftDraws:
    """Draws of a batch of three from a random model; top-k 2 in the second sequence, so that supports end."""
    shape = RANDOM_CONSTRUCTIONS[name].shape(levels)
    sampling = DraftSampling(
        np.stack([gumbel_noise(seed, b, sum(shape.noise_rows), SUPPORT) for b in range(BATCH)]),
        np.full(BATCH, temperature, np.float32),
        np.array([0, 2, 0], np.int32),
        np.ones(BATCH, np.float32),
    )

    def support_of(b: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, b, *path])
        return rng.permutation(9)[:SUPPORT].astype(np.int32), rng.normal(size=SUPPORT).astype(np.float32)

    return reference_draws(name, levels, [90, 91, 92], sampling, support_of)


def drawn_paths(drafts: DraftDraws, b: int) -> list[tuple[int, ...] | None]:
    """Path of every draw, the root's left out; None where nothing was drawn."""
    found: list[tuple[int, ...] | None] = [()]
    for flat in drafts.draws[b].tolist():
        node, entry = divmod(flat, SUPPORT)
        found.append((*found[node], int(drafts.ids[b, node, entry])) if flat >= 0 else None)
    return found[1:]


@pytest.mark.parametrize(("name", "levels", "widths", "noise_rows", "order"), [
    ("gumbel_top_k", (3, 2, 1), (3, 6, 6), (1, 3, 6), [0, 1, 3, 2, 4, 5, 9, 6, 7, 10, 11, 8, 12, 13, 14]),
    ("stochastic_beam", (3, 3), (3, 3), (1, 3), [0, 1, 3, 2, 4, 5]),
    ("stochastic_beam", (4, 2), (4, 2), (1, 4), [0, 1, 4, 2, 5, 3]),
    ("independent", (2, 2, 2), (2, 2, 2), (2, 2, 2), [0, 1, 2, 3, 4, 5]),
    ("random_chain", (1, 1), (1, 1), (1, 1), [0, 1]),
])  # fmt: skip
def test_shapes(name, levels, widths, noise_rows, order):
    shape = RANDOM_CONSTRUCTIONS[name].shape(levels)
    assert (shape.widths, shape.noise_rows, shape.cut_order.tolist()) == (widths, noise_rows, order)


@pytest.mark.parametrize(("name", "levels"), [("independent", (3, 2)), ("random_chain", (2, 2))])
def test_shapes_that_make_no_sense_are_refused(name, levels):
    with pytest.raises(ValueError, match=r"got \(\d, 2\)"):
        RANDOM_CONSTRUCTIONS[name].shape(levels)


@pytest.mark.parametrize(("name", "levels"), CASES)
def test_a_cut_keeps_a_prefix_of_each_nodes_draws_and_looks_at_none(name, levels):
    shape = RANDOM_CONSTRUCTIONS[name].shape(levels)
    total = sum(shape.widths)
    budgets = np.arange(total + 2, dtype=np.int32)
    for depth in range(1, len(levels) + 2):
        kept = shape.within(budgets, np.full(total + 2, depth, np.int32))
        within = int((shape.levels < depth).sum())
        assert kept.sum(axis=1).tolist() == np.minimum(budgets, within).tolist()
        for seed in range(5):
            drafts = some_draws(name, levels, seed)
            for b in range(BATCH):
                parents = drafts.draws[b] // SUPPORT
                for row in kept[:, drafts.draws[b] >= 0]:
                    places = np.flatnonzero(drafts.draws[b] >= 0)
                    there = {0, *(places[row] + 1).tolist()}
                    assert {int(parents[place]) for place in places[row]} <= there, "a draw is kept without its parent"
                    for parent in set(parents[places].tolist()):
                        siblings = row[parents[places] == parent]
                        assert (np.diff(siblings.astype(int)) <= 0).all(), "a later sibling is kept, an earlier one not"


@given(st.sampled_from(CASES), st.integers(0, 2**32), st.sampled_from([1e-4, 0.3, 1.0]))
@settings(max_examples=80)
def test_packing_keeps_every_draw(case, seed, temperature):
    name, levels = case
    drafts = some_draws(name, levels, seed, temperature)
    shape = RANDOM_CONSTRUCTIONS[name].shape(levels)
    budgets = np.random.default_rng(seed).integers(0, sum(shape.widths) + 2, BATCH).astype(np.int32)
    kept = shape.within(budgets, np.full(BATCH, 9, np.int32))
    tree = pack_draws(drafts, np.array([90, 91, 92], np.int32), kept)
    assert (tree.sizes - 1 <= budgets).all()
    for b in range(BATCH):
        expected = [path for path, keep in zip(drawn_paths(drafts, b), kept[b], strict=True) if keep and path]
        assert paths(tree, b) == {(), *expected}
        node_paths = [()]
        for token, parent, _ in tree.nodes[b][1:]:
            node_paths.append((*node_paths[parent], token))
        found = []
        for node, drawn in tree.draws[b].items():
            below = [path for path in expected if path[:-1] == node_paths[node]]
            assert [node_paths[child] for child in drawn.children] == below, "the draws, repeated, in draw order"
            assert [int(drawn.ids[place]) for place in drawn.entries] == [path[-1] for path in below]
            for child, place in zip(drawn.children, drawn.entries, strict=True):
                step = tree.nodes[b][child][2] - tree.nodes[b][node][2]
                assert step == pytest.approx(drawn.draft_log_probs[place], rel=1e-4, abs=1e-4 + 1e-6 / temperature)
            found += below
        assert sorted(found) == sorted(expected)


def test_repeats_share_a_node():
    drafts = some_draws("independent", (5,), 0, temperature=0.1)
    tree = pack_draws(drafts, np.array([90, 91, 92], np.int32), np.ones((3, 5), bool))
    assert (tree.sizes < 6).any()
    assert [len(draws[0].children) for draws in tree.draws] == [5, 5, 5]


@pytest.mark.parametrize("rule", [multi_round, k_seq])
def test_a_path_that_was_expanded_twice_with_other_bits_keeps_the_targets_law(rule):
    """Two sequences share the path [5], whose expansions list its next tokens in another order, with another p."""
    ids = np.array([[[5, 6], [7, 8], [8, 7]]], np.int32)
    p = np.array([[[0.5, 0.5], [0.7, 0.3], [0.4, 0.6]]])
    q = np.array([0, 0, 0, 0, 0, 0, 0, 0.2, 0.8])
    total = np.zeros_like(q)
    for first, second in np.ndindex(2, 2):
        draws = np.array([[0, 0, 2 + first, 4 + second]], np.int32)
        drafts = DraftDraws(ids, np.log(p).astype(np.float32), draws)
        tree = pack_draws(drafts, np.array([1], np.int32), np.ones((1, 4), bool))
        drawn = tree.draws[0][1]
        tokens = [tree.nodes[0][child][0] for child in drawn.children]
        assert tokens == [int(drawn.ids[place]) for place in drawn.entries] == [7 + first]
        total += p[0, 1, first] * p[0, 2, second] * law(rule, q, drawn)[0]
    np.testing.assert_allclose(total, q, atol=1e-6)


def test_cold_requests_draw_the_most_probable():
    for name, levels in CASES:
        drafts = some_draws(name, levels, 1, temperature=1e-4)
        for b in range(BATCH):
            best = np.argsort(-drafts.log_probs[b, 0])
            level = drafts.draws[b, : len(RANDOM_CONSTRUCTIONS[name].shape(levels).ranks[0])]
            if name in ("gumbel_top_k", "stochastic_beam"):
                assert level[level >= 0].tolist() == best[: (level >= 0).sum()].tolist()
            else:
                assert set(level.tolist()) == {best[0]}


def test_greedy_requests_get_trees_of_different_likely_paths():
    for name, levels in CASES:
        shape = RANDOM_CONSTRUCTIONS[name].shape(levels)
        drafts, noisy = (some_draws(name, levels, 1, temperature=t) for t in (0.0, 1.0))
        roots = np.array([90, 91, 92], np.int32)
        tree = pack_draws(drafts, roots, shape.within(np.full(BATCH, 99), np.full(BATCH, 9)))
        np.testing.assert_array_equal(
            drafts.log_probs[:, 0], noisy.log_probs[:, 0], "scores are those of temperature 1"
        )
        assert (tree.sizes - 1 == (drafts.draws >= 0).sum(axis=1)).all(), "no path twice"
        for b in range(BATCH):
            left = int(np.isfinite(drafts.log_probs[b, 0]).sum())
            best = np.argsort(-drafts.log_probs[b, 0], kind="stable")[: min(shape.widths[0], left)]
            assert [token for token, _, _ in tree.nodes[b][1 : 1 + len(best)]] == drafts.ids[b, 0, best].tolist()


def test_a_greedy_stochastic_beam_is_a_beam_search():
    drafts = some_draws("stochastic_beam", (3, 3), 4, temperature=0.0)
    for b in range(BATCH):
        totals = [float(drafts.log_probs[b].flat[place]) for place in drafts.draws[b, :3]]
        below = np.array(totals)[:, None] + drafts.log_probs[b, 1:4]
        assert drafts.draws[b, 3:].tolist() == (np.argsort(-below.ravel(), kind="stable")[:3] + SUPPORT).tolist()
