"""Fitted scores: whole, and of the build that they were fitted to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from redraft import whole_file
from redraft.bundle.method import MethodConfig
from redraft.bundle.scores import MethodScores, ScoresFile
from redraft.bundle.writer import finish_bundle, new_bundle
from redraft.decoding.defaults import NGRAM_CHANCES
from redraft.decoding.scores import UNFITTED, NgramScores, Scores
from redraft.errors import BundleError
from tests.bundle.test_bundle import CONFIG

METHOD = MethodConfig(construction=None, tree_budget=3, ngram=True)
NODES = (Scores(), Scores(temperature=0.7, slope=1.1, ngram_odds=0.3))
CHANCES = dict.fromkeys(NGRAM_CHANCES, (0.1, 0.2, 0.3, 0.4))
SCORES = MethodScores(nodes=NODES, ngrams=NgramScores(chances=CHANCES, joint_odds=(0.5, 2.0)))


def write_bundle(path: Path, command: str = "make engines") -> Path:
    """A bundle of two methods, without an engine."""
    with new_bundle(path, 100) as folder:
        methods = {"a": METHOD, "b": METHOD}
        finish_bundle(folder, CONFIG.model_copy(update={"methods": methods}), {}, "0123", command)
    return path


@pytest.fixture
def bundle(tmp_path) -> Path:
    """One whose first method is fitted."""
    ScoresFile(methods={"a": SCORES}).save(write_bundle(tmp_path / "tuned"))
    return tmp_path / "tuned"


def edit(file: Path, change) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_scores_are_read_as_they_were_written(bundle, tmp_path):
    assert ScoresFile.load(bundle).methods == {"a": SCORES}
    fitted = ScoresFile.load(bundle).fitted({"a": METHOD, "b": METHOD})
    assert {name: method.scores for name, method in fitted.items()} == {"a": NODES, "b": UNFITTED}
    assert {name: method.ngram_scores for name, method in fitted.items()} == {"a": SCORES.ngrams, "b": NgramScores()}
    edit(bundle / "scores.json", lambda raw: None)
    assert ScoresFile.load(bundle).methods == {"a": SCORES}, "only the layout is another"
    assert ScoresFile.load(write_bundle(tmp_path / "new")).methods == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is truncated or damaged"),
        (lambda file: edit(file, lambda raw: raw["methods"]["a"]["nodes"].pop(0)), "is truncated or damaged"),
        (lambda file: edit(file, lambda raw: raw["methods"]["a"]["nodes"][1].update(slope=1.2)), "was edited"),
        (
            lambda file: edit(file, lambda raw: raw["methods"]["a"]["ngrams"]["chances"].pop("6")),
            "is truncated or damaged",
        ),
        (lambda file: edit(file, lambda raw: raw["methods"]["a"]["ngrams"].update(joint_odds=[1, 1])), "was edited"),
        (lambda file: edit(file, lambda raw: raw["methods"].pop("a")), "was edited"),
        (lambda file: edit(file, lambda raw: raw.pop("sha256")), "was edited"),
    ],
)
def test_damaged_and_edited_scores_are_refused(bundle, damage, said):
    damage(bundle / "scores.json")
    with pytest.raises(ValueError, match=said) as refusal:
        ScoresFile.load(bundle)
    assert "redraft tune" in str(refusal.value)


def test_scores_of_another_build_are_refused(bundle, tmp_path):
    other = write_bundle(tmp_path / "other", "make engines SHAPE=")
    shutil.copy2(bundle / "scores.json", other)
    with pytest.raises(ValueError, match="was edited, or fitted to another build"):
        ScoresFile.load(other)


def test_a_full_disk_leaves_the_old_scores_and_nothing_else(bundle, monkeypatch):
    before = sorted(bundle.iterdir())
    monkeypatch.setattr(whole_file, "uuid4", lambda: SimpleNamespace(hex="1"))
    (bundle / ".scores.json.1.partial").symlink_to("/dev/full")
    with pytest.raises(BundleError, match=r"cannot write .*/scores.json: No space left"):
        ScoresFile(methods={}).save(bundle)
    assert ScoresFile.load(bundle).methods == {"a": SCORES}
    assert sorted(bundle.iterdir()) == before
