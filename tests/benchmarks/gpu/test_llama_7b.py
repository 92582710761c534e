"""The shaped target's script at a tiny size, and what it concludes from times."""

import json
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


def test_every_part_runs_and_is_written(tmp_path):
    output = tmp_path / "r.json"
    sizes = ["--context", "8", "--batches", "1", "3", "--rows", "1", "4", "--packed-rows", "5", "--repeats", "1"]
    llama_7b.main(["--device", "cpu", "--shape", "tiny", *sizes, "--eager", "--output", str(output)])
    report = json.loads(output.read_text())
    assert [(step["batch"], step["rows"]) for step in report["steps"]] == [
        (batch, rows) for batch in (1, 3) for rows in (1, 4, 5, 13, 16, 17)
    ]
    assert all(step["eager_milliseconds"] > 0 for step in report["steps"])
    for name, rows in (("redrafter", 5), ("lyanna", 17), ("lyanna, 3 x 4", 13), ("eagle3", 16)):
        system = report["systems"][name]
        assert [entry["rows"] for entry in system["allowed"]] == [rows, rows]
        measured = (
            set() if name in ("lyanna, 3 x 4", "eagle3") else {"SmolLM2, temperature 0", "SmolLM2, temperature 1"}
        )
        assert set(system["acceptance_lengths"]) == measured
        assert all(entry["milliseconds"] > 0 for entry in system["drafting"])
        assert [entry["batch"] for entry in system["trees"]] == [1, 3]
        times = {(step["batch"], step["rows"]): step["milliseconds"] for step in report["steps"]}
        for found, draft, trees in zip(system["allowed"], system["drafting"], system["trees"], strict=True):
            spent = times[found["batch"], rows] + draft["milliseconds"] + trees["milliseconds"]
            assert found["cost_in_steps"] == pytest.approx(spent / times[found["batch"], 1])


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


def test_both_of_the_papers_comparisons_stand_beside_the_projection():
    steps = [{"batch": 2, "rows": rows, "milliseconds": ms} for rows, ms in ((1, 10.0), (19, 15.0))]
    drafting = [{"batch": 2, "milliseconds": 5.0}]
    system = {
        "drafting": drafting,
        "trees": [{"batch": 2, "milliseconds": 0.0}],
        "acceptance_lengths": {"ours": 3.0},
        "allowed": allowed(steps, drafting, {2: 0.0}, 19, {"ours": 3.0}),
    }
    _, projection = llama_7b.tables({"shape": "tiny", "steps": steps, "systems": {"redrafter": system}})
    assert projection.title.startswith("Projection: ")
    cells = dict(projection.rows)
    assert cells["redrafter, ours"] == "1.50x"
    assert (
        cells["redrafter, accepted tokens for 2.09x to 2.56x (the paper's, TensorRT-LLM, low load)"] == "4.18 to 5.12"
    )
    assert cells["redrafter, accepted tokens for 2.19x to 2.51x (the paper's, TensorRT-LLM, TP 1)"] == "4.38 to 5.02"


def test_a_cpu_leaves_the_gpus_results_alone(capsys):
    with pytest.raises(SystemExit):
        llama_7b.main(["--device", "cpu"])
    assert "--device cpu needs --output" in capsys.readouterr().err
