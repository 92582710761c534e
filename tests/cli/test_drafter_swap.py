"""The bundle that is served, with another drafter: which options of its build stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from redraft.bundle.config import FORMAT_VERSION
from redraft.bundle.manifest import FileEntry, Manifest, file_sha256
from redraft.cli import application, drafter_swap
from redraft.cli.drafter_swap import options_with, with_drafter
from redraft.errors import BundleError


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a model and two drafters."""
    monkeypatch.setattr(drafter_swap, "HOME", tmp_path)
    for name in ("model", "first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    return tmp_path


def build(place: Path, options: str) -> str:
    return f"redraft build --model {place / 'model'} {options} --output {place / 'served'} --replace"


def test_all_stays_but_the_drafter_and_the_folder(place):
    served = build(place, f"--precision source --drafter {place / 'first'} --bigrams b.npy --tree-budget 7 --slots 3")
    options = options_with(served, place / "second")
    assert options.pop("--output").startswith(str(place / "engines" / "model-source-"))
    assert options == {
        "--model": str(place / "model"),
        "--precision": "source",
        "--tree-budget": "7",
        "--slots": "3",
        "--drafter": str(place / "second"),
        "--replace": "",
    }


def test_settings_of_ngrams_are_not_for_a_drafter(place):
    served = build(place, "--no-drafter --ngram --construction chain --tree-budget 7 --features")
    options = options_with(served, place / "first")
    assert not options.keys() & {"--no-drafter", "--ngram", "--construction", "--tree-budget"}
    assert "--features" in options


def test_two_drafters_have_two_bundles_and_the_same_one_has_the_same(place):
    outputs = [options_with(build(place, ""), place / name)["--output"] for name in ("first", "second", "first")]
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize(
    ("options", "drafter", "said"),
    [
        ("--methods m.toml", "first", "has several methods"),
        ("", "third", "is not a drafter"),
        ("--model", "first", "does not say what it was built of"),
    ],
)
def test_what_cannot_be_built_is_said(place, options, drafter, said):
    command = "redraft build --model" if options == "--model" else build(place, options)
    with pytest.raises(BundleError, match=said):
        options_with(command, place / drafter)


def test_a_model_that_is_gone_is_said(place):
    command = build(place, "")
    (place / "model" / "config.json").unlink()
    (place / "model").rmdir()
    with pytest.raises(BundleError, match="is gone: redraft fetch fetches it again"):
        options_with(command, place / "first")


def test_both_bundles_have_one_target(place, monkeypatch):
    monkeypatch.setattr(drafter_swap.Steps, "built_bundle", lambda self, options: write("next") and options)
    manifest = {"format_version": FORMAT_VERSION, "versions": {}, "cpu_features": [], "target_fingerprint": "f"}

    def write(name: str) -> Path:
        folder = place / name if name == "served" else Path(options_with(command, place / "first")["--output"])
        folder.mkdir(parents=True)
        (folder / "target.weights").write_bytes(b"weights")
        entry = FileEntry(sha256=file_sha256(folder / "target.weights"), size=7)
        text = Manifest(files={"target.weights": entry}, command=command, **manifest).model_dump_json()
        (folder / "manifest.json").write_text(text)
        return folder

    command = build(place, "")
    served = write("served")
    bundle = with_drafter(served, place / "first", "redraft swap")
    assert bundle != served
    assert (bundle / "target.weights").samefile(served / "target.weights")


@pytest.mark.parametrize("words", [[], ["--back", "--bundle", "b"], ["--drafter", "d", "--bundle", "b"]])
def test_a_swap_is_to_one_thing(words):
    done = CliRunner().invoke(application("swap"), ["swap", *words])
    assert done.exit_code == 2
    assert "give one of --bundle FOLDER, --drafter FOLDER and --back" in done.output
