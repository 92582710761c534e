"""The scheduler on the torch backend, whose results the next call overwrites.

The slow cases would catch a kind of drafter or a verifier that reads results after they are overwritten.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.cuda.graphs import CudaGraphCache
from redraft.engines.cuda.transfer import Results
from tests.conftest import slow
from tests.engines.draws import LEVELS, SUPPORT
from tests.engines.scheduling import TABLE, generate
from tests.engines.tiny import tiny_bundle, tiny_drafter_of

PLANS = {
    "best first": {"construction": "best_first", "budget": TABLE},
    "beams and n-grams": {"construction": "beam", "ngram": True, "budget": BudgetTable.constant(12)},
}


@pytest.fixture
def overwritten(monkeypatch):
    """Graphs share their memory, as on a GPU: a call of any function overwrites all results of the last one, but
    not what was fetched of them."""
    call, last = CudaGraphCache.__call__, list[torch.Tensor]()

    def calling(calls, inputs, rows):
        assert "features" not in inputs or not (inputs["features"] == -1).all(1).any()
        found = call(calls, inputs, rows)
        for tensor in last:
            tensor.fill_(-1)
        last[:] = found
        return found

    monkeypatch.setattr(CudaGraphCache, "__call__", calling)
    monkeypatch.setattr(Results, "fetch", lambda self, outputs, _=None: [output.numpy().copy() for output in outputs])


@pytest.mark.parametrize("kind", ["recurrent", slow("eagle"), slow("draft_lm")])
def test_the_scheduler_speculates_to_the_same_text(kind, target, tmp_path, overwritten, monkeypatch):
    """Whether tokens are chosen on the device or on the host, from logits; what crosses the bus is as said."""
    monkeypatch.setattr("redraft.engines.torch.draws_on", lambda _: True)
    bundle = tiny_bundle(tmp_path, target, "torch", trained=tiny_drafter_of(target, kind))
    engine, fetched = load_engine(bundle), list[tuple[int, int]]()
    execute = engine.execute

    def counted(batch, samplers, meanwhile):
        rows, hidden = execute(batch, samplers)
        owners = np.searchsorted(batch.row_offsets, batch.logit_rows, side="right") - 1
        logits = sum(rows[row : row + 1].ndim == 2 for row in range(len(owners)))
        fetched.append((logits, sum(samplers[owner] is None for owner in owners)))
        assert isinstance(hidden, torch.Tensor)
        return rows, hidden

    engine.execute = lambda batch, samplers, meanwhile: execute(batch)
    expected = generate(engine, None)[0]
    engine.execute = counted
    assert generate(engine, None)[0] == expected
    for name, plan in PLANS.items():
        tokens, scheduler = generate(engine, MethodConfig(**plan))
        assert tokens == expected, name
        assert scheduler.totals.drafted > scheduler.totals.accepted
    assert all(logits == of_penalized for logits, of_penalized in fetched)
    assert {0} < {logits for logits, _ in fetched}


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
def test_rejection_takes_the_same_tokens_from_logits_of_its_rows(construction, target, tmp_path, overwritten):
    """The device gives logits where sampled requests need them, and tokens to greedy ones."""
    levels = {"construction": construction, "levels": LEVELS[construction], "support": SUPPORT}
    verification = "recursive_rejection" if construction == "stochastic_beam" else "k_seq"
    plan = MethodConfig(**levels, verification=verification, tree_budget=7)
    found = []
    for backend in ("torch", "openvino"):
        engine = load_engine(tiny_bundle(tmp_path / backend, target, backend, verification=verification, **levels))
        found.append(generate(engine, plan)[0])
    assert found[0] == found[1]
