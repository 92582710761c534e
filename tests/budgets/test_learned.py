"""The file of what was learned: read at the next start, ignored where it is damaged or foreign."""

from __future__ import annotations

import json
import os

import pytest

from redraft.budgets import learned
from redraft.budgets.choice import choose_nodes
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, StepShape
from redraft.budgets.gain import Calibration
from redraft.budgets.learned import LearnedFile
from redraft.budgets.warm_up import time_steps
from redraft.bundle.folder import MANIFEST
from redraft.bundle.scores import MethodScores, ScoresFile
from redraft.decoding.scores import Scores
from redraft.decoding.token_tree import TokenTree
from redraft.scheduling.scheduler import Limits
from tests.toy_engine import ToyEngine


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / MANIFEST).write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def drafts_at_once(monkeypatch):
    monkeypatch.setattr("redraft.budgets.controller.FIRST_PLAIN", 0)


def estimates():
    return Estimates(costs=time_steps(ToyEngine(slots=2), Limits(2, 64, 8, 16), 7))


def test_what_was_learned_comes_back(bundle):
    controller = BudgetController(estimates())
    controller.begin(StepShape(1))
    assert controller.pays("m", [0])
    tree = TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.1), (3, 1, -0.7)]])
    choice = choose_nodes(tree, controller.terms("m"))
    controller.take("m", choice)
    controller.end(["m"], [0], tree, [sum(choice.counts)], 0.01, 0.008)
    LearnedFile.of(bundle).save(controller.estimates)
    assert LearnedFile.of(bundle).load() == controller.estimates != estimates()
    assert not list(bundle.glob(".*")), "no partial file stays"


def test_what_drafts_gain_is_kept_by_temperature():
    controller = BudgetController(estimates())
    tree = TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.1)]] * 2)
    for bands in ([0, 0], [3, 3], [3, 0]):
        controller.balance_s = 1.0
        controller.begin(StepShape(2))
        assert controller.pays("m", bands)
        controller.take("m", choose_nodes(tree, controller.terms("m")))
    assert {key[:4] for key in controller.estimates.histories} == {"m:1:"}
    assert {key[4:] for key in controller.estimates.histories} == {"0", "3"}


def test_nothing_was_learned_of_a_new_bundle(bundle):
    assert LearnedFile.of(bundle).load() is None


@pytest.fixture
def warnings(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(learned.log, "warning", lambda text, *args: lines.append(text % args))
    return lines


@pytest.mark.parametrize("harm", ["damaged", "foreign"])
def test_what_does_not_fit_is_ignored_and_logged(bundle, harm, warnings):
    LearnedFile.of(bundle).save(estimates())
    path = LearnedFile.of(bundle).path
    if harm == "damaged":
        path.write_bytes(path.read_bytes()[:50])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    assert LearnedFile.of(bundle).load() is None
    (line,) = warnings
    assert str(path) in line
    assert "learning anew" in line


def test_a_folder_that_cannot_be_written_to_is_logged(bundle, monkeypatch, warnings):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    LearnedFile.of(bundle).save(estimates())
    assert "No space left" in warnings[0]
    assert LearnedFile.of(bundle).load() is None


def test_estimates_have_a_size_that_can_be_kept():
    costs = StepCosts(tables=estimates().costs.tables)
    for load in range(1, 65):
        costs.of(StepShape(load)).observe(load, "m", 0.02, 0.01)
    whole = Estimates(costs=costs, calibrations={"m": Calibration()})
    assert len(whole.model_dump_json()) < 10_000


def test_a_file_system_that_is_read_only_is_logged(bundle, monkeypatch, warnings):
    """Where a file that is not there cannot be removed either."""

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.write_text", read_only)
    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    LearnedFile.of(bundle).save(estimates())
    assert "Read-only file system" in warnings[0]


def test_what_an_old_worker_learned_is_not_taken_for_the_new_build(bundle, warnings):
    old = LearnedFile.of(bundle)
    (bundle / MANIFEST).write_text("{} ")
    old.save(estimates())
    assert LearnedFile.of(bundle).load() is None


def test_a_service_with_a_few_steps_leaves_what_another_has_learned_of_many(bundle):
    """Both began with the same file. The first requests alone are steps."""
    busy, idle = estimates(), estimates()
    for content, steps in ((busy, 9), (idle, 2)):
        for _ in range(steps):
            content.costs.of(StepShape(1)).observe(1, "", 0.02, 0.01)
    for content in (idle, busy, idle):
        LearnedFile.of(bundle).save(content)
    assert LearnedFile.of(bundle).load() == busy
    busy.costs.of(StepShape(1)).observe(1, "", 0.04, 0.02)
    LearnedFile.of(bundle).save(busy)
    assert LearnedFile.of(bundle).load() == busy


def test_what_no_start_reads_again_is_removed(bundle):
    LearnedFile.of(bundle).save(estimates())
    (bundle / MANIFEST).write_text("{} ")
    kept = [LearnedFile.of(bundle), LearnedFile.of(bundle, threads=1)]
    for file in kept:
        file.save(estimates())
    (bundle / "learned.damaged.json").write_text("{")
    killed, at_work = bundle / ".learned.damaged.json.1.partial", bundle / f".{kept[0].path.name}.2.partial"
    for partial in (killed, at_work):
        partial.touch()
    os.utime(killed, (0, 0))
    kept[0].remove_outdated()
    assert {*bundle.iterdir()} == {bundle / MANIFEST, at_work, *(file.path for file in kept)}


def test_what_was_learned_of_other_scores_counts_for_nothing(bundle):
    """Ratios and histories are of what the scores promise."""
    LearnedFile.of(bundle).save(estimates())
    ScoresFile(methods={"drafter": MethodScores(nodes=(Scores(),))}).save(bundle)
    assert LearnedFile.of(bundle).load() is None


def test_a_file_that_cannot_be_read_is_said(bundle, warnings, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    LearnedFile.of(bundle).save(estimates())
    monkeypatch.setattr("pathlib.Path.is_file", refused)
    monkeypatch.setattr("pathlib.Path.read_bytes", refused)
    file = LearnedFile(bundle, "machine", "build")
    assert file.load() is None
    assert "Permission denied" in warnings[0]


@pytest.mark.parametrize("other", [{"threads": 1}, {"gpu": "H100"}, {"threads": 8}])
def test_other_threads_and_gpus_learn_for_themselves(bundle, other):
    LearnedFile.of(bundle, threads=8, gpu="H200").save(estimates())
    assert LearnedFile.of(bundle, **other).load() is None
    assert LearnedFile.of(bundle, threads=8, gpu="H200").load() is not None


def test_bundles_share_a_folder(bundle, tmp_path):
    """One that is made where it is missing: a bundle may not be written to."""
    other, folder = tmp_path / "other", tmp_path / "a" / "learned"
    other.mkdir()
    (other / MANIFEST).write_text("{ }")
    for each, error in ((bundle, 0.1), (other, 0.2)):
        content = estimates()
        content.costs.error = error
        LearnedFile.of(each, folder=folder).save(content)
    kept = [LearnedFile.of(each, folder=folder).load() for each in (bundle, other)]
    assert [content and content.costs.error for content in kept] == [0.1, 0.2]
    assert len(list(folder.iterdir())) == 2
    assert not list(bundle.glob("learned*"))


@pytest.mark.parametrize(
    "table",
    [
        {"seconds": [0.0]},
        {"seconds": [0.1, 0.2]},
        {"rows": [0]},
        {"rows": [2, 1], "seconds": [0.1, 0.2]},
        {"seconds": [float("nan")]},
    ],
)
def test_a_table_that_makes_no_sense_is_damaged(bundle, table, warnings):
    file = LearnedFile.of(bundle)
    file.save(estimates())
    content = json.loads(file.path.read_text())
    content["estimates"]["costs"]["tables"] = [{"sequences": 1, "rows": [1], "seconds": [0.1], "padded": False} | table]
    file.path.write_text(json.dumps(content))
    assert file.load() is None
    assert "is damaged" in warnings[0]


def test_a_load_that_is_none_is_damaged(bundle, warnings):
    file = LearnedFile.of(bundle)
    file.save(estimates())
    content = json.loads(file.path.read_text())
    content["estimates"]["costs"]["factors"] = {"x": {"value": 1.0, "count": 9}}
    file.path.write_text(json.dumps(content))
    assert file.load() is None
