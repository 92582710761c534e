"""Layers that only some families have, in bundles: windows, norms, learned positions, experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.memory import target_cache_bytes
from redraft.engines.openvino import OpenVINOEngine
from tests.conftest import slow_but
from tests.engines.drafters.drafting import Drafting, check_draft, draft
from tests.engines.tiny import (
    LAYERS,
    LIMITS,
    VOCAB,
    caches_of,
    chain,
    expected,
    make_batch,
    random_tree,
    tiny_bundle,
    tiny_drafter_of,
    tiny_of,
)

LONG = LIMITS.model_copy(update={"max_len": 700})
"""Longer than the rings of layers with a window."""
TOLERANCE = 1e-4
"""Of the largest logit."""
PARTS = ("qwen3", "mistral")
"""Families whose layers have nothing that those of `qwen3 moe` and `mixtral` lack."""
BUNDLES = [*(f"openvino, {layers}" for layers in LAYERS if layers not in PARTS), "torch, gemma3", "torch, mixtral"]
FAST = ["openvino, gemma3", "openvino, mixtral"]


@pytest.fixture(scope="module", params=slow_but(FAST, BUNDLES))
def served(request, tmp_path_factory):
    """A target and its loaded bundle, with a drafter of one such layer."""
    backend, layers = request.param.split(", ")
    target = tiny_of(layers, max_position=LONG.max_len)
    drafter = tiny_drafter_of(target, "eagle")
    bundle = tiny_bundle(tmp_path_factory.mktemp(layers), target, backend, trained=drafter, limits=LONG, beam_length=2)
    rows = [bundle.config.cache_rows(layer) for layer in range(2)]
    assert rows == {"gemma3": [320, 740], "mixtral": [320, 320]}.get(layers, [740, 740])
    engine = load_engine(bundle)
    assert sum(cache.nbytes for cache in caches_of(engine)) == target_cache_bytes(bundle.config)
    yield target, engine, drafter
    engine.close()


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def prefill(engine, contexts: dict[int, list[int]]) -> None:
    """Fill slots in steps of as many rows as a ring takes."""
    for slot, context in contexts.items():
        for start in range(0, len(context), 312):
            engine.execute(make_batch([chain(slot, context[:start], context[start : start + 312], causal=True)]))


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(found, want, atol=TOLERANCE * np.abs(want).max(), rtol=0)


def test_nodes_beyond_the_contexts_last_position(served):
    """A deep draft at the end of the longest text: what stands in the context is as ever, and the rest does no harm."""
    target, engine, _ = served
    text = tokens(np.random.default_rng(3), LONG.max_len - 3)
    prefill(engine, {0: text})
    found = engine.execute(make_batch([chain(0, text, tokens(np.random.default_rng(4), 9))]))[0]
    assert np.isfinite(found).all()
    assert_same(found[:3], expected(target, [chain(0, text, tokens(np.random.default_rng(4), 9)[:3])])[0])


def test_trees_and_commits_agree_with_the_module(served):
    """Of contexts that end before, at and beyond a window's edge, and before the end of a ring's second lap;
    then trees after a committed path."""
    target, engine, _ = served
    rng = np.random.default_rng(7)
    contexts = dict(enumerate(tokens(rng, length) for length in (4, 8, 15, 638)))
    prefill(engine, contexts)
    trees = [random_tree(rng, slot, context, 12) for slot, context in contexts.items()]
    logits, features = engine.execute(make_batch(trees))
    for found, want in zip((logits, features), expected(target, trees), strict=True):
        assert_same(found, want)
    following = []
    for tree in trees:
        path = tree.ancestors(11)[::-1]
        accepted = tree.context + [tree.tokens[row] for row in path]
        following.append(dataclasses.replace(random_tree(rng, tree.slot, accepted, 7), commit=path))
    assert_same(engine.execute(make_batch(following))[0], expected(target, following)[0])


def test_more_rows_than_a_ring_takes_are_refused(served):
    _, engine, _ = served
    rows = chain(0, [1] * 9, [1] * 313, causal=True)
    if min(cache.shape[2] for cache in caches_of(engine)) > LONG.max_len:
        pytest.skip("its layers have no window")
    with pytest.raises(ValueError, match="rows of a sequence is 313: expected 0 to 312"):
        engine.execute(make_batch([rows]))


def test_a_tree_row_has_the_bits_of_the_token_decoded_alone(served):
    engine = served[1]
    if not isinstance(engine, OpenVINOEngine):
        pytest.skip("torch's products depend on the number of rows")
    rng = np.random.default_rng(3)
    context = tokens(rng, 316)
    prefill(engine, dict.fromkeys((0, 3), context))
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
