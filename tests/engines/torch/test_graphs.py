"""CUDA graphs of the torch backend, recorded by a stand-in: what is captured, and what shares memory.

The slow cases would catch a kind of drafter whose drafts are captured only while requests wait.
"""

from __future__ import annotations

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.cuda.buckets import decode_buckets, draft_buckets
from redraft.engines.memory import output_bytes
from redraft.errors import BundleError
from redraft.method import MethodPlan
from tests.conftest import slow
from tests.engines.cuda.graphs import FakeGraphs
from tests.engines.scheduling import TABLE, generate
from tests.engines.tiny import LIMITS, METHOD, VOCAB, chain, make_batch, random_tree


@pytest.mark.parametrize("bundle_of_kind", ["recurrent", slow("hidden_state"), slow("eagle")], indirect=True)
def test_all_graphs_are_captured_at_load_from_the_largest_down(bundle_of_kind, graphs):
    """No step and no draft captures another one, and the caches are as they were."""
    engine = load_engine(bundle_of_kind)
    steps, drafter = decode_buckets(LIMITS), engine.drafters[METHOD]
    drafts = draft_buckets(LIMITS, drafter.reads_context)
    again = len(drafter.resamples) if bundle_of_kind.config.methods[METHOD].chain_levels else 0
    captured = len(steps) + len(drafts) + again
    assert graphs.captured == captured == len(engine.steps) + len(drafter.drafts) + again
    assert [shapes[0] for shapes in graphs.results[: len(steps)]] == [(bucket.rows, VOCAB) for bucket in steps]
    assert graphs.results[len(steps)][0][0] == LIMITS.slots
    assert not any(cache.any() for cache in engine.caches[0] + engine.caches[1])
    assert not any(cache[: LIMITS.slots].any() for cache in drafter.caches)
    tokens, scheduler = generate(engine, MethodPlan(construction="best_first", budget=TABLE))
    assert graphs.captured == captured
    assert graphs.replayed > scheduler.totals.steps
    assert tokens == generate(engine, None)[0]


def test_steps_share_the_memory_of_their_results(bundle, graphs):
    engine = load_engine(bundle)
    logits, hidden = engine.steps.outputs
    assert len(logits) == len(hidden) == LIMITS.slots * LIMITS.max_tree
    assert sum(output.numel() * output.element_size() for output in (logits, hidden)) == output_bytes(bundle.config)
    rng = np.random.default_rng(0)
    for rows in (1, 9, 40):
        assert engine.execute(make_batch([random_tree(rng, 0, [], rows)]))[1].data_ptr() == hidden.data_ptr()
    assert engine.execute(make_batch([chain(0, [], [5] * 9, causal=True)]))[1].data_ptr() == hidden.data_ptr()
    prompt = make_batch([chain(0, [], [5] * 9, causal=True)])
    prompt.logit_rows = prompt.logit_rows[-1:]
    assert engine.execute(prompt)[1].data_ptr() != hidden.data_ptr()


def test_too_little_memory_for_the_graphs_says_what_would_fit(bundle, monkeypatch):
    """Nothing is given up and tried again."""
    for room in (0, 3):
        graphs = FakeGraphs(room)
        monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _, graphs=graphs: graphs)
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed"):
            load_engine(bundle)
        assert len(graphs.results) == room + 1
