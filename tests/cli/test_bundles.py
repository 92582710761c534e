"""Which bundles are built again: those that were built from something else."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from redraft import cli
from redraft.bundle.manifest import Bundle, Manifest
from redraft.cli import build
from redraft.cli.bundles import as_arguments, complete, needs_build
from redraft.cli.options import fetched_model
from redraft.compiler import built_from
from redraft.compiler.methods import MethodSettings
from redraft.errors import BundleError
from tests.cli.commands import invoke, run_command
from tests.conftest import ROOT
from tests.engines.tiny import tiny_drafter, tiny_target

METHODS = """
[usual]
drafter = "drafter"
[wide]
drafter = "drafter"
beam_width = 5
"""
FLAGS = {"--model": "model", "--max-len": "64", "--slots": "3", "--output": "b"}


@pytest.fixture(scope="module")
def built(model, tmp_path_factory) -> Path:
    """A folder with a model, a drafter, a methods file, and a bundle `b` of the drafter. Bundle `m` says that it is of
    the methods."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(model, folder / "model")
    tiny_drafter(tiny_target()).save(folder / "drafter")
    (folder / "methods.toml").write_text(METHODS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = invoke(build.main, *as_arguments(command(drafter="drafter")))
        assert done.exit_code == 0, done.output
        inputs = built_from.built_from(command(methods="methods.toml", output="m"))
    manifest = Manifest.read(folder / "b").model_copy(update={"built_from": inputs})
    shutil.copytree(folder / "b", folder / "m")
    (folder / "m" / "manifest.json").write_text(manifest.model_dump_json())
    return folder


@pytest.fixture
def place(built, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, with the files' times, as the current directory."""
    shutil.copytree(built, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def command(**changes: str | None) -> dict[str, str]:
    """The options of the bundle `b`, but for the changes."""
    options = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return complete({name: value for name, value in options.items() if value is not None})


def other_weights(file: Path) -> None:
    """Change one number; the size stays."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def everything(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "change",
    [
        lambda place: None,
        lambda place: [os.utime(file) for file in everything(place)],
        lambda place: (place / "drafter" / "README.md").write_text("trained on a Tuesday"),
        lambda place: (place / "drafter" / "checkpoint.safetensors").write_bytes(b"of a training that goes on"),
        lambda place: (place / "model" / "source.json").write_text("{}"),
    ],
)
def test_what_is_there_is_not_built_again(place, capsys, change):
    change(place)
    assert not needs_build(command(drafter="drafter"))
    assert not needs_build(command(methods="methods.toml", output="m"), named=True)
    assert capsys.readouterr().err == ""


def test_paths_and_the_order_of_options_do_not_matter(place):
    (place / "drafter").rename(place / "moved")
    (place / "methods.toml").rename(place / "other.toml")
    moved = command(drafter="moved")
    assert not needs_build(dict(reversed(moved.items())))
    (place / "moved").rename(place / "drafter")
    assert not needs_build(command(methods="other.toml", output="m"))


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        (lambda: other_weights(Path("drafter/drafter.safetensors")), {}, "--drafter drafter.safetensors is another"),
        (lambda: other_weights(Path("model/model.safetensors")), {}, "--model model.safetensors is another"),
        (lambda: Path("model/config.json").write_text("{}"), {}, "--model config.json is another"),
        (lambda: Path("drafter/bigrams.npy").write_bytes(b"."), {}, "--drafter bigrams.npy was not there"),
        (lambda: shutil.rmtree("drafter"), {}, "--drafter config.json is gone"),
        (None, {"beam_width": "3"}, "it has no --beam-width, asked for is --beam-width 3"),
        (None, {"slots": "4"}, "it has --slots 3, asked for is --slots 4"),
        (None, {"precision": "int8"}, "it has --precision bf16, asked for is --precision int8"),
        (None, {"tp": "2"}, "it has no --tp, asked for is --tp 2"),
        (None, {"drafter": None, "methods": "methods.toml"}, "--methods was not there"),
        (
            None,
            {"drafter": None, "methods": "methods.toml", "output": "m", "slots": "4"},
            "it has --slots 3, asked",
        ),
    ],
)
def test_what_was_built_from_something_else_is_built_again(place, capsys, change, asked, said):
    if change:
        change()
    arguments = command(**{"drafter": "drafter", **asked})
    assert needs_build(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{asked.get('output', 'b')} is built again: ")
    assert said in line


def with_manifest(**fields) -> None:
    manifest = Manifest.read(Path("b")).model_copy(update=fields)
    Path("b/manifest.json").write_text(manifest.model_dump_json())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: Path("b/tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda: Path("b/config.json").write_text("{}"), "config.json has 2 bytes, expected"),
        (lambda: with_manifest(files={}) or Path("b/config.json").write_text("{}"), "config.json is invalid"),
        (lambda: with_manifest(cpu_features=["avx4096"]), "it needs a CPU with avx4096"),
        (lambda: with_manifest(versions={"openvino": "1.0"}), "it was built by openvino 1.0, here is "),
    ],
)
def test_what_cannot_be_loaded_is_built_again(place, capsys, change, said):
    """In a folder that the user named too: it is the same bundle."""
    change()
    assert needs_build(command(drafter="drafter"), named=True)
    assert said in capsys.readouterr().err


RUN_TIME = {
    "compiler/built_from.py",
    *(f"{name}.py" for name in ("__init__", "batch", "bound", "errors", "operator_build", "request", "runtime")),
    "whole_file.py",
    *(f"scheduling/{name}.py" for name in ("__init__", "counts", "packing", "prompt_rows", "scheduler", "slots")),
    *(f"{name}.py" for name in ("output", "pairs", "request_state")),
    *(f"{name}.py" for name in ("bundle/__init__", "bundle/folder", "bundle/machine", "bundle/scores")),
    "worker/__init__.py",
    *(f"learning/{name}.py" for name in ("__init__", "answers", "policy", "recording", "shard_file")),
    *(f"budgets/{name}.py" for name in ("__init__", "choice", "controller", "cost", "gain", "learned")),
    "budgets/warm_up.py",
    *(f"{name}.py" for name in ("bundle/budget_table", "fields", "metrics", "options")),
    *(f"drafting/{name}.py" for name in ("__init__", "cutting", "groups", "inputs", "method", "native")),
    *(f"drafting/{name}.py" for name in ("proposers", "resampling", "served")),
    "loose_json.py",
    *(f"console/{name}.py" for name in ("__init__", "interrupt", "output", "program", "progress", "resources")),
    *(f"decoding/{name}.py" for name in ("__init__", "defaults", "draws", "growth", "log_probs", "native", "ngram")),
    *(
        f"decoding/{name}.py"
        for name in ("noise", "origins", "packing", "rejection", "sampling", "scores", "text_store", "token_tree")
    ),
    *(f"engines/{name}.py" for name in ("__init__", "api", "cache_check", "cache_rows", "features")),
    *(f"engines/{name}.py" for name in ("drafter", "host_buffers", "timing")),
    *(f"grammar/{name}.py" for name in ("__init__", "compiler", "guided", "state", "trial")),
    *(f"engines/cuda/{name}.py" for name in ("__init__", "buckets", "device", "masks", "sampling", "transfer")),
    *(f"engines/tensorrt/{name}.py" for name in ("__init__", "drafter", "session", "target")),
    "worker/protocol.py",
    *(f"plugins/trees/{name}.py" for name in ("__init__", "native")),
    *(f"plugins/operators/sampling/{name}.py" for name in ("__init__", "cpu", "cuda")),
    "cli/__init__.py",
    "compiler/__init__.py",
    "fields.py",
    "home.py",
    "options.py",
    *(f"cli/{name}.py" for name in ("bundles", "options")),
}
"""Modules that are imported with those that build, and decide nothing of what a bundle holds."""


def test_all_code_that_builds_counts():
    script = """
import sys
from pathlib import Path
import redraft.cli.build, redraft.model_defs.export.programs
import redraft.compiler.writers.openvino, redraft.compiler.writers.tensorrt, redraft.compiler.writers.torch
root = Path(redraft.__file__).parent
names = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
files = {Path(name) for name in names if name.startswith("/")}
print(*(file.relative_to(root) for file in files if file.is_relative_to(root)))
"""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'build'}"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=path, capture_output=True, text=True)
    imported, counted = set(done.stdout.split()), set(built_from.source_files(scaled=True))
    assert "compiler/writers/shared.py" in imported
    assert imported - counted == RUN_TIME & imported
    assert not counted & RUN_TIME


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: Path("methods.toml").write_text(METHODS.replace("5", "4")), "--methods is another"),
        (
            lambda: other_weights(Path("drafter/drafter.safetensors")),
            "--methods [usual] drafter drafter.safetensors",
        ),
        (lambda: Path("methods.toml").write_text("[usual"), "--methods is another"),
    ],
)
def test_methods_count_by_their_content(place, capsys, change, said):
    change()
    assert needs_build(command(methods="methods.toml", output="m"))
    assert said in capsys.readouterr().err


def test_a_folder_that_the_user_named_is_not_replaced_by_another_bundle(place, monkeypatch):
    with pytest.raises(BundleError) as refusal:
        needs_build(command(drafter="drafter", slots="4"), named=True)
    assert str(refusal.value) == (
        "b is another bundle than the one asked for: it has --slots 3, asked for is --slots 4. Add --replace to build "
        "that one in its place, choose another --output, or serve it as it is: redraft serve --bundle b"
    )
    monkeypatch.setattr(built_from, "sources_digest", lambda scaled: "newer")
    assert needs_build(command(drafter="drafter"), named=True), "the same bundle by newer code"


@pytest.mark.parametrize("options", [(), ("--replace",)])
def test_a_folder_of_other_files_is_refused_before_anything_is_loaded(place, monkeypatch, options):
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter").touch()
    monkeypatch.setattr(build, "load_target", None)
    done = run_command(["build", "--model", "model", "--drafter", "drafter", "--output", "thesis", *options])
    assert (done.exit_code, (place / "thesis" / "chapter").exists()) == (1, True)
    assert "thesis holds other files, which would be deleted" in done.output
    for directory in ("model", "."):
        with pytest.raises(BundleError, match=f"{directory} holds other files"):
            needs_build(command(drafter="drafter", output=directory))


def test_other_code_builds_again(place, monkeypatch, capsys):
    monkeypatch.setattr(built_from, "sources_digest", lambda scaled: "newer")
    assert needs_build(command(drafter="drafter"))
    assert capsys.readouterr().err == "b is built again: the code that builds it has changed\n"


def test_the_code_counts_by_content(tmp_path, monkeypatch):
    changes = {
        "cli/tune.py": False,
        "model_defs/a.py": True,
        "plugins/b/kernel.cu": True,
        "plugins/operators/sampling/kernel.h": False,
    }
    for name in ("compiler/writers/shared.py", "chat.py", "templates/renderer.py", *changes):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(built_from, "PACKAGE", tmp_path)
    for scaled in (False, True):
        before = built_from.sources_digest(scaled)
        for name, counts in (changes | {"chat.py": scaled, "templates/renderer.py": scaled}).items():
            (tmp_path / name).write_text("2")
            assert (built_from.sources_digest(scaled) != before) == counts, name
            (tmp_path / name).write_text("1")
        assert built_from.sources_digest(scaled) == before


def test_the_texts_that_features_are_scaled_by_count(place, monkeypatch):
    """Of the precisions that are scaled, and only these."""
    scaled, plain = command(precision="int4"), command(precision="int8")
    assert plain["--backend"] == "openvino"
    before, other = built_from.built_from(scaled), built_from.built_from(plain)
    assert before.sources != other.sources
    (place / "prompts.jsonl").write_text('{"prompt": "Another one."}')
    monkeypatch.setattr(built_from, "PROMPTS", place / "prompts.jsonl")
    assert built_from.differences(before, built_from.built_from(scaled)) == [built_from.CODE]
    assert built_from.built_from(plain) == other
    assert built_from.built_from(command(precision="int4", backend="tensorrt")).sources == other.sources


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 2}', '{"format_version": 99}'])
def test_a_manifest_that_cannot_be_read_is_built_again_in_a_folder_of_ours_only(place, text):
    """A newer version's bundle is as little another's to replace as one of other settings."""
    (place / "b" / "manifest.json").write_text(text)
    assert needs_build(command(drafter="drafter"))
    with pytest.raises(BundleError, match=r"b is another bundle than the one asked for: b.*Add --replace"):
        needs_build(command(drafter="drafter"), named=True)


def test_a_bundle_that_is_not_there_is_built(place, capsys):
    assert needs_build(command(drafter="drafter", output="c"), named=True)
    assert capsys.readouterr().err == ""


def test_a_bundle_of_before_says_nothing_of_its_making(place, capsys):
    manifest = Manifest.read(place / "b").model_dump_json(exclude={"built_from"})
    (place / "b" / "manifest.json").write_text(manifest)
    assert Bundle.load(place / "b")
    assert needs_build(command(drafter="drafter"))
    assert "does not say what it was built from" in capsys.readouterr().err


def test_every_option_that_names_a_file_is_known():
    parameters = inspect.signature(build.main, eval_str=True).parameters.items()
    names = {f"--{name.replace('_', '-')}" for name, parameter in parameters if Path in types_of(parameter.annotation)}
    assert names - {"--output"} == set(built_from.PATHS)
    fields = {name for name, field in MethodSettings.model_fields.items() if Path in types_of(field.annotation)}
    assert fields == set(built_from.IN_METHODS)


def types_of(annotation: object) -> set[object]:
    """All types that an annotation is made of."""
    parts: Callable[[object], set[object]] = lambda of: {of}.union(*(parts(part) for part in get_args(of)))  # noqa: E731
    return parts(annotation)


def test_the_command_says_what_is_there_and_refuses_another(place, monkeypatch, capsys):
    options = ("--model", "model", "--drafter", "drafter", "--max-len", "64", "--output", "b")
    monkeypatch.setattr(build, "load_target", None)  # nothing is loaded
    done = run_command(["build", *options, "--slots", "3"])
    assert (done.exit_code, done.output) == (0, "redraft build: b is up to date\n")
    done = run_command(["build", *options, "--slots", "4"])
    assert done.exit_code == 1
    assert "b is another bundle than the one asked for: it has --slots 3" in done.output
    done = run_command(["build", *options, "--slots", "4", "--replace"])
    assert isinstance(done.exception, TypeError), "it goes on to load the target"
    monkeypatch.setattr(sys, "argv", ["redraft", "build", *options, "--slots", "3"])
    monkeypatch.setattr(cli, "application", None)  # nor a module of the command
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == 0
    assert capsys.readouterr().err == "redraft build: b is up to date\n"


@pytest.mark.parametrize(
    "words",
    [
        ["build", "ASKED", "b"],
        ["build", "b", "ASKED"],
        ["build", "ASKED", "--typo"],
        ["build", "ASKED", "--replace", "b"],
        ["build", "ASKED", "--calibration"],
        ["--typo", "build", "ASKED"],
    ],
)
def test_a_command_line_that_is_wrong_is_not_up_to_date(place, monkeypatch, words):
    asked = ["--model", "model", "--drafter", "drafter", "--max-len", "64", "--slots", "3", "--output", "b"]
    line = [word for name in words for word in (asked if name == "ASKED" else [name])]
    monkeypatch.setattr(sys, "argv", ["redraft", *line])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == 2


def test_a_value_of_zero_is_a_value(place, monkeypatch):
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(build, "complete", lambda options: complete(asked.append(options) or options))
    monkeypatch.setattr(build, "load_target", None)
    zero = {"--support": "0", "--resample-above": "0", "--skip-above": "0"}
    run_command(["build", "--model", "model", "--output", "c", "--drafter", "drafter", *as_arguments(zero)])
    assert asked[0].items() >= zero.items()


def test_what_is_left_out_follows_from_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.cli.bundles.HOME", tmp_path)
    monkeypatch.setattr("redraft.cli.options.HOME", tmp_path)
    monkeypatch.setattr("redraft.home.HOME", tmp_path)
    model = tmp_path / "models" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)

    def folder(**options: str) -> str:
        return Path(
            complete({f"--{name.replace('_', '-')}": value for name, value in options.items()})["--output"]
        ).name

    usual = complete({})
    assert (usual["--model"], usual["--precision"]) == (str(model), "bf16")
    assert usual["--drafter"] == str(ROOT / "drafters" / model.name)
    assert folder() == f"{model.name}-redrafter-bf16"
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "gguf"}}')
    assert folder() == f"{model.name}-redrafter-source"
    assert folder(backend="torch") == f"{model.name}-redrafter-bf16-torch"
    assert folder(precision="int8") == f"{model.name}-redrafter-int8"
    floats = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "float"}}}}
    for settings in ({"quant_method": "fp8"}, floats):
        (model / "config.json").write_text(json.dumps({"quantization_config": settings}))
        assert folder() == f"{model.name}-redrafter-bf16", "openvino's operators have no fp8"
        assert folder(backend="torch") == f"{model.name}-redrafter-fp8-torch"
        assert folder(backend="tensorrt") == f"{model.name}-redrafter-bf16-tensorrt", "which would need a calibration"
    for odd in ("{}", "[]", '{"quantization_config": null}', "{"):
        (model / "config.json").write_text(odd)
        assert folder() == f"{model.name}-redrafter-bf16"
    assert folder(drafter="my/eagle3", tp="2", backend="torch") == f"{model.name}-eagle3-bf16-torch-tp2"
    assert folder(no_drafter="", precision="fp32") == f"{model.name}-ar-fp32"
    assert folder(no_drafter="", ngram="") == f"{model.name}-ngrams-bf16"
    assert folder(model="other") == "other-ngrams-bf16"
    for drafts in ({"construction": "beam_search"}, {"ngram": ""}):  # of what, is for the user to say
        options = {f"--{name}": value for name, value in {"model": "other", **drafts}.items()}
        assert complete(options).items() >= options.items() - {("--model", "other")}
        assert not complete(options).keys() & {"--drafter", "--no-drafter"}
    assert folder(methods="benchmarks/lossless.toml") == f"{model.name}-lossless-bf16"
    calibration = tmp_path / "calibration" / f"{model.name}.json"
    calibration.parent.mkdir()
    calibration.write_text("{}")
    assert complete({"--precision": "fp8", "--backend": "tensorrt"})["--calibration"] == str(calibration)
    assert "--calibration" not in complete({"--precision": "fp8", "--backend": "torch"})


def test_a_folder_is_named_however_it_is_written(tmp_path, monkeypatch):
    for name in ("Mine", "Mine-eagle3"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "Mine")
    for model in (".", "../Mine", str(tmp_path / "Mine")):
        assert Path(complete({"--model": model})["--output"]).name == "Mine-ngrams-bf16"
        assert fetched_model(model).name == "Mine"
    monkeypatch.chdir(tmp_path / "Mine-eagle3")
    assert Path(complete({"--model": "../Mine", "--drafter": "."})["--output"]).name == "Mine-eagle3-bf16"


def test_what_a_bundle_is_built_of_is_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {"--drafter": "d", "--bigrams": "b.npy", "--calibration": str(tmp_path / "c")}
    assert complete(named).items() >= {name: str(tmp_path / Path(path)) for name, path in named.items()}.items()


def test_it_asks_without_torch():
    asked = "import sys, redraft.cli.bundles; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", asked], check=True, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'build'}"})
