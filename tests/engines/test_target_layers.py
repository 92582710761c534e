"""Layers that only some families have, in bundles: windows, norms, learned positions, experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.openvino import OpenVINOEngine
from tests.conftest import slow_but
from tests.engines.drafters.drafting import Drafting, check_draft, draft
from tests.engines.tiny import (
    LIMITS,
    VOCAB,
    chain,
    expected,
    make_batch,
    random_tree,
    tiny_bundle,
    tiny_drafter_of,
    tiny_of,
)

TOLERANCE = 1e-4
"""Of the largest logit."""
BUNDLES = ["openvino, qwen3", "openvino, gemma3", "openvino, opt", "openvino, mixtral", "torch, mixtral"]
FAST = ["openvino, gemma3", "openvino, mixtral"]


@pytest.fixture(scope="module", params=slow_but(FAST, BUNDLES))
def served(request, tmp_path_factory):
    """A target and its loaded bundle, with a drafter of one such layer."""
    backend, layers = request.param.split(", ")
    target = tiny_of(layers, max_position=LIMITS.max_len)
    drafter = tiny_drafter_of(target, "eagle")
    bundle = tiny_bundle(tmp_path_factory.mktemp(layers), target, backend, trained=drafter)
    engine = load_engine(bundle)
    yield target, engine, drafter
    engine.close()


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(found, want, atol=TOLERANCE * np.abs(want).max(), rtol=0)


def test_nodes_beyond_the_contexts_last_position(served):
    """A deep draft at the end of the longest text: what stands in the context is as ever, and the rest does no harm."""
    target, engine, _ = served
    text = tokens(np.random.default_rng(3), LIMITS.max_len - 3)
    engine.execute(make_batch([chain(0, [], text, causal=True)]))
    found = engine.execute(make_batch([chain(0, text, tokens(np.random.default_rng(4), 9))]))[0]
    assert np.isfinite(found).all()
    assert_same(found[:3], expected(target, [chain(0, text, tokens(np.random.default_rng(4), 9)[:3])])[0])


def test_trees_and_commits_agree_with_the_module(served):
    """Of contexts that end before, at and beyond a window's edge; then trees after a committed path."""
    target, engine, _ = served
    rng = np.random.default_rng(7)
    contexts = [tokens(rng, length) for length in (4, 8, 15)]
    for slot, context in enumerate(contexts):
        engine.execute(make_batch([chain(slot, [], context, causal=True)]))
    trees = [random_tree(rng, slot, context, 12) for slot, context in enumerate(contexts)]
    logits, features = engine.execute(make_batch(trees))
    for found, want in zip((logits, features), expected(target, trees), strict=True):
        assert_same(found, want)
    following = []
    for tree in trees:
        path = tree.ancestors(11)[::-1]
        accepted = tree.context + [tree.tokens[row] for row in path]
        following.append(dataclasses.replace(random_tree(rng, tree.slot, accepted, 7), commit=path))
    assert_same(engine.execute(make_batch(following))[0], expected(target, following)[0])


def test_a_tree_row_has_the_bits_of_the_token_decoded_alone(served):
    engine = served[1]
    if not isinstance(engine, OpenVINOEngine):
        pytest.skip("torch's products depend on the number of rows")
    rng = np.random.default_rng(3)
    context = tokens(rng, 7)
    for slot in (0, 3):
        engine.execute(make_batch([chain(slot, [], context, causal=True)]))
    tree = random_tree(rng, 0, context, 15)
    in_tree = engine.execute(make_batch([random_tree(rng, 1, [], 4), tree]))[0][4:].copy()
    path = tree.ancestors(14)[::-1]
    for i, row in enumerate(path):
        done = context + [tree.tokens[r] for r in path[:i]]
        alone, _ = engine.execute(make_batch([chain(3, done, [tree.tokens[row]])]))
        np.testing.assert_array_equal(alone[0], in_tree[row])


def test_a_drafter_of_such_a_layer_agrees_with_its_module(served):
    """Of contexts within a window and beyond it."""
    _, engine, drafter = served
    rng, sequences = np.random.default_rng(5), [Drafting(slot) for slot in (2, 0)]
    for counts in ((5, 9), (8, 1)):
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.grow(rng, count)
        drafted = draft(engine, sequences)
        for b, sequence in enumerate(sequences):
            check_draft(drafter, drafted, b, sequence)
