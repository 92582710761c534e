"""The shaped target's script at a tiny size, and what it concludes from times."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu import llama_7b
from benchmarks.gpu.llama_7b import allowed
from redraft.batch import DraftCandidates
from redraft.bundle.budget import BudgetTable
from redraft.method import Method, MethodPlan
from redraft.request import GenerateRequest
from redraft.sequence import Sequence
from tests.toy_engine import toy_codec


@pytest.mark.parametrize("budget", [12, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_best_first_trees_are_those_of_the_scheduler(batch, budget):
    """The same drafts, through the plan of the method whose acceptance length is projected."""
    rng, shape = np.random.default_rng(0), (batch, 4, 4, 8)
    log_probs = -rng.random(shape, dtype=np.float32)
    log_probs[:, 0, 1:] = -np.inf
    for level in range(1, 4):
        log_probs[:, level] += log_probs[:, level - 1, 0, :4, None]
    parents = np.tile(np.arange(4, dtype=np.int32), (batch, 4, 1))
    drafts = DraftCandidates(rng.integers(111, size=shape, dtype=np.int32), log_probs, parents)
    request = GenerateRequest(id="r", text="t", max_tokens=64)
    sequences = [Sequence(b, request, [5, 6], toy_codec(), frozenset()) for b in range(batch)]
    for b, sequence in enumerate(sequences):
        sequence.root, sequence.features = b, np.zeros((1, 8), np.float32)
    drafter = SimpleNamespace(draft=lambda *_: drafts, reads_context=False)
    plan = MethodPlan("best_first", budget=BudgetTable.constant(budget))
    tree = Method(plan, drafter, llama_7b.MAX_TREE).draft(sequences, batch)
    roots = np.arange(batch, dtype=np.int32)
    tokens, depths, masks = llama_7b.target_rows(llama_7b.best_first_tree(drafts, roots, budget))
    paths = [path for paths in tree.ancestors for path in paths]
    assert tokens == [token for nodes in tree.nodes for token, _, _ in nodes]
    assert masks == paths
    assert depths == [path.bit_count() - 1 for path in paths]
    assert len(tokens) == batch * (1 + budget)


def test_speed_up_is_tokens_over_the_cost_of_a_step():
    steps = [{"batch": 2, "rows": rows, "milliseconds": ms} for rows, ms in ((1, 10.0), (19, 12.0))]
    (found,) = allowed(steps, [{"batch": 2, "milliseconds": 2.5}], {2: 0.5}, 19, {"ours": 3.0})
    assert found["cost_in_steps"] == pytest.approx(1.5)
    assert found["speedup_allowed"]["ours"] == pytest.approx(2.0)
    assert found["acceptance_length_needed"]["2.19x"] == pytest.approx(1.5 * 2.19)
