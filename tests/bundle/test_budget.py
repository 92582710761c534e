"""Budget tables: whole, of the build that they were measured on, and known to be missing."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from redraft.bundle import budget
from redraft.bundle.budget import BudgetFile
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.bundle.writer import finish_bundle, new_bundle
from redraft.errors import BundleError, program
from tests.bundle.test_bundle import CONFIG

METHOD = MethodConfig(
    drafter=None,
    construction=None,
    beam_width=1,
    beam_length=1,
    candidates=1,
    tree_budget=3,
    ngram=True,
    verification="sampled_walk",
)
TABLE = BudgetTable(entries=BudgetTable.constant(3).entries, measured={"step_ms": {"1": {"0": 20.125, "3": 1e-7}}})


def write_bundle(path: Path, command: str = "make engines") -> Path:
    """A bundle of two methods, without an engine."""
    with new_bundle(path, 100) as folder:
        methods = {"a": METHOD, "b": METHOD}
        finish_bundle(folder, CONFIG.model_copy(update={"methods": methods}), {}, "0123", command)
    return path


@pytest.fixture
def bundle(tmp_path) -> Path:
    """One that is tuned."""
    BudgetFile(methods={"a": TABLE, "b": TABLE}).save(write_bundle(tmp_path / "tuned"))
    return tmp_path / "tuned"


def edit(file: Path, change) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_tables_are_read_as_they_were_written(bundle, tmp_path):
    assert BudgetFile.load(bundle).methods == {"a": TABLE, "b": TABLE}
    shutil.copytree(bundle, tmp_path / "copy")
    edit(tmp_path / "copy" / "budget.json", lambda raw: None)
    assert BudgetFile.load(tmp_path / "copy").methods == {"a": TABLE, "b": TABLE}, "only the layout is another"
    assert BudgetFile.load(write_bundle(tmp_path / "new")).methods == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is truncated or damaged"),
        (lambda file: edit(file, lambda raw: raw["methods"]["a"].pop("entries")), "is truncated or damaged"),
        (lambda file: edit(file, lambda raw: raw["methods"]["a"]["entries"][0].update(nodes=63)), "was edited"),
        (lambda file: edit(file, lambda raw: raw["methods"].pop("b")), "was edited"),
        (lambda file: edit(file, lambda raw: raw.pop("sha256")), "was edited"),
    ],
)
def test_damaged_and_edited_tables_are_refused(bundle, damage, said):
    damage(bundle / "budget.json")
    with pytest.raises(ValueError, match=said) as refusal:
        BudgetFile.load(bundle)
    assert f"run `{program('redraft')} tune --bundle" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert said in budget.why_untuned(bundle)


def test_tables_of_another_build_are_refused(bundle, tmp_path):
    other = write_bundle(tmp_path / "other", "make engines SHAPE=")
    shutil.copy2(bundle / "budget.json", other)
    with pytest.raises(ValueError, match="was edited, or measured on another build"):
        BudgetFile.load(other)


def test_a_full_disk_leaves_the_old_tables_and_nothing_else(bundle):
    before = sorted(bundle.iterdir())
    (bundle / ".budget.json.partial").symlink_to("/dev/full")
    with pytest.raises(BundleError, match=r"cannot write .*/budget.json: No space left"):
        BudgetFile(methods={}).save(bundle)
    assert BudgetFile.load(bundle).methods == {"a": TABLE, "b": TABLE}
    assert sorted(bundle.iterdir()) == before


def test_methods_that_are_not_tuned_are_named(bundle, tmp_path):
    assert budget.why_untuned(bundle) == ""
    BudgetFile(methods={"b": TABLE}).save(bundle)
    assert budget.why_untuned(bundle) == f"{bundle} is not tuned: a"
    assert budget.why_untuned(tmp_path / "nowhere")
    (bundle / "manifest.json").unlink()
    assert budget.why_untuned(bundle)


def test_the_command_that_tunes_starts_as_many_ranks_as_the_bundle_needs(tmp_path):
    """And may be pasted into a shell, whatever the bundle is called."""
    bundle = tmp_path / "my bundle; $(touch x)"
    bundle.mkdir()
    for config, launcher in (("{}", []), ('{"tensor_parallel": 2}', [program("mpiexec"), "-n", "2"])):
        (bundle / "config.json").write_text(config)
        command = budget.how_to_tune(bundle).partition("`")[2].rpartition("`")[0]
        tune = [program("redraft"), "tune", "--bundle", str(bundle)]
        assert shlex.split(command) == [*launcher, *tune]
