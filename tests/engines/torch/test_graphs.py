"""CUDA graphs of the torch backend, recorded by a stand-in: what is captured, and what shares memory.

The slow cases would catch a kind of drafter whose drafts are captured only while requests wait.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.cuda.buckets import draft_buckets, step_buckets
from redraft.engines.memory import output_bytes, pair_bytes
from redraft.errors import BundleError
from tests.conftest import slow
from tests.engines.cuda.graphs import FakeGraphs
from tests.engines.scheduling import TABLE, generate
from tests.engines.tiny import LIMITS, METHOD, VOCAB, chain, make_batch, random_tree


@pytest.mark.parametrize("bundle_of_kind", ["recurrent", slow("hidden_state"), slow("eagle")], indirect=True)
def test_all_graphs_are_captured_at_load_from_the_largest_down(bundle_of_kind, graphs):
    """No step and no draft captures another one, and the caches are as they were."""
    engine = load_engine(bundle_of_kind)
    steps, drafter = step_buckets(LIMITS), engine.drafters[METHOD]
    drafts = draft_buckets(LIMITS, drafter.reads_context)
    again = len(drafter.resamples) if bundle_of_kind.config.methods[METHOD].chain_levels else 0
    captured = len(steps) + len(drafts) + again
    assert graphs.captured == captured == len(engine.steps) + len(drafter.drafts) + again
    assert [shapes[0] for shapes in graphs.results[: len(steps)]] == [(bucket.logits, VOCAB) for bucket in steps]
    assert graphs.results[len(steps)][0][0] == LIMITS.slots
    inputs = [call.inputs.tensors["features"] for call in drafter.drafts._calls.values()]
    assert sum(features.nbytes for features in inputs) == pair_bytes(bundle_of_kind.config) or not drafter.reads_context
    assert not any(cache.any() for cache in engine.caches[0] + engine.caches[1])
    assert not any(cache[: LIMITS.slots].any() for cache in drafter.caches)
    tokens, scheduler = generate(engine, MethodConfig(construction="best_first", budget=TABLE))
    assert graphs.captured == captured
    assert graphs.replayed > scheduler.totals.steps
    assert tokens == generate(engine, None)[0]


LARGE_CHUNKS = LIMITS.model_copy(update={"max_len": 87, "max_tree": 33, "prefill_chunk": 400})
"""Caches of the same size, and steps with prompts that have more rows than trees."""


def test_steps_replay_the_graphs_that_they_fit_and_change_nothing_else(bundle, graphs):
    """Trees, parts of prompts, both, and scored prompts: logits, features and caches of the steps without graphs, in
    memory that all share. Caches that are not the step's stay as they are."""
    config = bundle.config.model_copy(update={"limits": LARGE_CHUNKS})
    engine, rng = load_engine(dataclasses.replace(bundle, config=config)), np.random.default_rng(0)
    logits, hidden = engine.steps.outputs
    assert (len(logits), len(hidden)) == (9 * 33, 8 * 33 + 200)
    assert sum(output.numel() * output.element_size() for output in (logits, hidden)) == output_bytes(config)
    prompts = [chain(slot, [], rng.integers(0, VOCAB, 70).tolist(), causal=True) for slot in (8, 2, 3, 7, 5)]
    trees = {rows: random_tree(rng, 4, [], rows) for rows in (1, 9, 33)}
    last = [69, 139, 209, 279, 349]
    steps = [
        *(([tree], range(rows), True) for rows, tree in trees.items()),
        (prompts[:1], [], True),
        (prompts[:1], [69], True),
        ([trees[9], *prompts[:2]], [*range(9), 9 + 69], True),
        (prompts, last, True),
        (prompts[:2], range(140), True),
        (prompts, range(350), False),
    ]
    all_buckets, caches = engine._buckets, [cache for kind in engine.caches for cache in kind]
    for sequences, logit_rows, replays in steps:
        found, batch, before = [], make_batch(sequences), graphs.replayed
        batch.logit_rows = np.array(logit_rows, np.int32)
        for buckets in (all_buckets, []):
            for cache in caches:
                cache.fill_(1)
            engine._buckets = buckets
            given, features = engine.execute(batch)
            assert (features.data_ptr() == hidden.data_ptr()) == (replays and bool(buckets))
            found.append([tensor.clone() for tensor in (torch.from_numpy(given), features, *caches)])
        assert graphs.replayed - before == replays
        assert len(found[0][0]) == len(logit_rows)
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager, rtol=5e-5, atol=1e-4)


def test_too_little_memory_for_the_graphs_says_what_would_fit(bundle, monkeypatch):
    """Nothing is given up and tried again."""
    for room in (0, 3):
        graphs = FakeGraphs(room)
        monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _, graphs=graphs: graphs)
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed"):
            load_engine(bundle)
        assert len(graphs.results) == room + 1
