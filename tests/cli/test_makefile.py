"""What make would do, by its dry run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from redraft.bundle.backends import BACKENDS
from redraft.compiler.methods import read_methods
from redraft.serving import ranks
from redraft.serving.processes import ServingError
from tests.conftest import ROOT


def dry_run(*arguments: str) -> str:
    """The commands where nothing has been built."""
    command = ["make", "--dry-run", "ENGINES=nowhere", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_every_shipped_drafter_is_a_method_of_the_file_that_names_them():
    drafters = [method.drafter for method in read_methods(ROOT / "build" / "drafters.toml").values()]
    assert {ROOT / drafter for drafter in drafters} == {*(ROOT / "drafters").iterdir()}


def test_verify_compares_the_default_the_published_methods_and_every_pair():
    commands = dry_run("verify").replace("\\\n", "")
    for kind, methods in (
        ("methods", "benchmarks/methods/methods.toml"),
        ("lossless", "benchmarks/methods/lossless.toml"),
    ):
        (built,) = [line for line in commands.splitlines() if f"--methods {methods}" in line]
        assert "--precision fp32" in built
        assert built.endswith(f"-{kind}-fp32")
    compared = [line for line in commands.splitlines() if "benchmarks.verify.lossless" in line]
    for kind, line in zip(("redrafter", "methods", "lossless"), compared, strict=True):
        assert f"-{kind}-fp32 " in line
    assert len({line.partition("--output")[2] for line in compared}) == 3


STAND_IN = """#!/bin/sh
echo "$*" >> asked
for last; do :; done
case "$*" in
  *ensure_bundle.py*)
    [ ! -f stale ] || rm -rf "$last"
    mkdir -p "$last"
    [ -f "$last/manifest.json" ] || touch "$last/manifest.json";;
  "-m redraft.bundle.budget "*) [ -f "$last/budget.json" ];;
  *tune.py*) touch "$3/budget.json";;
esac
"""
"""Python, where a bundle is built if it is not there, or if a file `stale` is, and tuned if it has no table."""


@pytest.fixture
def make(tmp_path):
    """Runs make with STAND_IN for Python, and returns what it was asked to run."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "requirements.txt",
        "requirements-gpu.txt",
        "requirements-triton.txt",
        ".venv/.setup",
        "m.toml",
    ):
        (tmp_path / name).touch()
    for name in ("model/source.json", "drafter/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    python = tmp_path / ".venv/bin/python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    settings = "MODEL=model", "NAME=n", "DRAFTER=drafter"

    def run(*arguments: str) -> list[str]:
        (tmp_path / "asked").unlink(missing_ok=True)
        command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), *settings, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return (tmp_path / "asked").read_text().splitlines()

    return run


def test_bundles_are_asked_for_each_time_and_tuned_when_they_were_built(make, tmp_path):
    def programs(target: str) -> list[str]:
        return [line.removeprefix("-m ").split()[0].removeprefix("build/") for line in make(target)]

    asked = ["ensure_bundle.py", "redraft.bundle.budget"]
    assert programs("serve") == [*asked, "tune.py", "redraft.cli"]
    assert programs("serve") == [*asked, "redraft.cli"]
    for file in tmp_path.rglob("*"):
        os.utime(file)
    assert programs("serve") == [*asked, "redraft.cli"]
    assert programs("engines") == ["ensure_bundle.py"] * 2
    assert programs("quickstart") == [*asked, "ensure_bundle.py", "benchmarks.load.quickstart"]
    (tmp_path / "stale").touch()
    assert programs("serve") == [*asked, "tune.py", "redraft.cli"]
    (tmp_path / "stale").unlink()
    assert programs("tune") == ["ensure_bundle.py", "tune.py"], "who asks for it gets other budgets"


def test_all_settings_are_compared_and_a_folder_of_the_users_is_not_replaced(make):
    built, baseline = make("engines", "METHODS=m.toml", "PRECISION=int8")
    common = "build/ensure_bundle.py --backend openvino --model model --precision int8"
    assert " ".join(built.split()) == f"{common} --methods m.toml --output artifacts/engines/n-redrafter-int8"
    assert " ".join(baseline.split()) == f"{common} --no-drafter --output artifacts/engines/n-ar-int8"
    built, baseline = make("engines", "BUNDLE=mine", "SHAPE=--beam-width 2")
    assert built.endswith(" --named --drafter drafter --beam-width 2 --output mine")
    assert "--named" not in baseline
    built, baseline = make("engines", "BASELINE=mine")
    assert "--named" not in built
    assert "--beam-length" not in built
    assert baseline.endswith(" --named --no-drafter --output mine")


def test_drafters_of_another_kind_have_teacher_data_and_a_folder_of_their_own(make):
    *_, built, distilled, trained = make("distill", "train", "KIND=eagle3")
    assert "--features --target-layers usual " in built
    assert built.endswith("--output artifacts/data/n-layers-engine")
    assert distilled.endswith("--target-layers usual --bundle artifacts/data/n-layers-engine")
    assert "--data artifacts/data/n-layers " in trained
    assert "--output artifacts/drafters/n-eagle3 " in trained
    assert trained.endswith("--drafter eagle3")
    *_, built, distilled, trained = make("distill", "train")
    assert "--target-layers" not in built + distilled
    assert "--output artifacts/drafters/n --positions" in " ".join(trained.split())
    assert trained.endswith("--drafter recurrent")


def test_another_kind_has_a_bundle_of_its_own(make, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert any("n-eagle3-bf16" in line for line in make("engines", "KIND=eagle3", f"DRAFTER={tmp_path}"))
    assert not any("n-eagle3-bf16" in line for line in make("engines", f"DRAFTER={tmp_path}"))


def test_a_models_folder_may_end_with_a_slash(make, tmp_path):
    command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), "engines", "MODEL=model/", "DRAFTER=drafter/"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert "--output artifacts/engines/model-redrafter-bf16\n" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("x.gguf", "x.gguf is a GGUF file and no drafter is read from one: set DRAFTER to the folder that it was"),
        ("model", "model holds no drafter: it has no config.json"),
        ("owner/name", "no drafter at owner/name: train one with make distill train, or set DRAFTER to a folder, such"),
    ],
)
def test_what_is_no_drafters_folder_is_told_what_to_give(make, tmp_path, drafter, message):
    (tmp_path / "x.gguf").touch()
    command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), "engines", "MODEL=model"]
    done = subprocess.run([*command, f"DRAFTER={drafter}"], capture_output=True, text=True)
    assert message in done.stderr


def test_a_plan_is_for_the_usual_kind():
    command = ["make", "drafter", "KIND=eagle3", "MODEL=nowhere/nobody"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "make distill train KIND=eagle3 TOKENS=... POSITIONS=... trains another" in done.stdout


def test_bundles_of_backends_precisions_and_ranks_have_names_of_their_own(make):
    folders = [
        line.split("--output ")[1]
        for given in ((), ("PRECISION=int8",), ("TP=2",), ("BACKEND=torch",), ("BACKEND=torch", "TP=2"))
        for line in make("engines", *given)
    ]
    assert len(set(folders)) == len(folders) == 10


def test_ranks_that_tune_are_started_as_those_that_serve(monkeypatch):
    """They open no port either; a container's are started in the same way."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    served = shlex.join(ranks.launch_command(["python"], 2))
    options = served.partition(" -exitinfo ")[2].removesuffix(" python")
    assert f".venv/bin/mpiexec.gforker {options} .venv/bin/python build/tune.py" in dry_run("tune", "TP=2")
    page = " ".join((ROOT / "docs" / "guides" / "deployment.md").read_text().replace("\\\n", "").split())
    assert f" mpiexec.gforker {options} python build/tune.py" in page
    assert "-genv UCX_TLS tcp,self" in dry_run("tune", "TP=2", "UCX_TLS=tcp,self")


def test_help_names_every_backends_precisions():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    for backend in BACKENDS.values():
        assert f"{backend} {' '.join(backend.precisions)}" in said


def test_several_ranks_without_mpi_are_told_what_serving_says(tmp_path, monkeypatch):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "requirements.txt",
        "requirements-gpu.txt",
        "requirements-triton.txt",
        ".venv/.setup",
    ):
        (tmp_path / name).touch()
    command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile")]
    monkeypatch.setattr(sys, "prefix", ".venv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServingError) as told:
        ranks.launch_command([], 2)
    for target in ("serve", "tune"):
        done = subprocess.run([*command, target, "TP=2"], capture_output=True, text=True)
        assert done.returncode == 2
        assert f"make: {told.value}\n" in done.stdout, done.stdout + done.stderr
    launcher = Path(".venv/bin/mpiexec.gforker")
    launcher.touch(0o755)
    for arguments in ((), ("TP=2",)):
        assert subprocess.run([*command, "mpi", *arguments]).returncode == 0


@pytest.mark.parametrize("target", ["setup", "artifacts/clients/.setup"])
@pytest.mark.parametrize("python", ["Python 3.12.1", ""])
def test_another_python_is_refused_before_anything_is_installed(tmp_path, python, target):
    """Or one that is not there, not the index of torch."""
    names = ("pyproject.toml", "requirements.txt", "requirements-gpu.txt", "requirements-triton.txt")
    for name in (*names, "requirements-clients.txt"):
        (tmp_path / name).touch()
    other = tmp_path / "python3.12"
    if python:
        other.write_text(f'#!/bin/sh\n[ "$1" != --version ] || echo {python}\n[ "$1" = --version ]\n')
        other.chmod(0o755)
    command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), target, f"PYTHON={other}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"make: needs Python 3.11 with venv, got {other} ({python}" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / "artifacts").exists()


def test_engines_for_tensorrt_have_the_default_drafter_only():
    """All five that ship take METHODS=build/drafters.toml."""
    for backend in ("tensorrt", "tensorrt_rtx"):
        commands = dry_run("engines", f"BACKEND={backend}").replace("\\\n", "")
        assert "--methods" not in commands
        assert "--drafter drafters/SmolLM2-135M-Instruct " in commands


def test_quickstart_takes_the_ports_and_the_load():
    ports = ("HTTP_PORT=1", "GRPC_PORT=2", "METRICS_PORT=3", "OPENAI_PORT=4")
    commands = dry_run("quickstart", *ports, "RATES=7 8", "PROMPTS=a.csv", "COLUMN=text")
    said = " ".join(commands.replace("\\\n", "").split())
    assert '--ports 1 2 3 4 --request-rate 7 8 --dataset a.csv --column "text"' in said


def test_a_model_that_is_there_gets_a_chat_template(make):
    (asked,) = make("model", "CHAT_TEMPLATE=own.jinja", "SOURCE=owner/name")
    assert asked.endswith("--chat-template own.jinja")


@pytest.mark.parametrize(
    ("source", "name"),
    [("default", "SmolLM2-135M-Instruct"), ("owner/base", "base"), ("/a/base.gguf", "base")],
)
def test_a_model_with_an_adapter_has_a_name_of_its_own(source, name):
    command = dry_run("model", f"SOURCE={source}", "ADAPTER=/b/mine/")
    assert f"build/fetch_model.py {source} --name {name}-mine " in command
    assert "--adapter /b/mine/" in command


@pytest.mark.parametrize("hours", ["abc", "-1", "0", "nan", ""])
def test_hours_are_checked_before_anything_is_built(hours):
    command = ["make", "drafter", f"HOURS={hours}", "MODEL=nowhere/nobody"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith(f"make: HOURS={hours}: "), done.stdout
    assert "nobody" not in done.stdout + done.stderr


def test_a_missing_model_is_named_before_its_drafter():
    command = ["make", "--dry-run", "serve", "MODEL=nowhere/nobody"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nowhere/nobody is not there" in done.stderr


def test_prompts_are_checked_before_the_teachers_engine_is_built(tmp_path):
    """And conversations to judge by are distilled apart."""
    teacher = f"TEACHER={tmp_path}/teacher"
    commands = dry_run("distill", teacher, "DATA=mine.jsonl").replace("\\\n", "").splitlines()
    built, taught = (line for line in commands if "--model" in line)
    checked, _, built = built.partition(") && ")
    assert "build/ensure_bundle.py" in built
    assert "--max-len $length " in built
    parts = f"--prompts mine.jsonl --output {tmp_path}/teacher --held-out {tmp_path}/teacher-held-out "
    for line in (checked, taught):
        assert parts in " ".join(line.split())
        assert f"--bundle {tmp_path}/teacher-engine" in line
    assert checked.endswith(" --check")
    assert "--check" not in taught
    assert "held-out" not in dry_run("train", teacher)
    (tmp_path / "teacher-held-out").mkdir()
    assert f"--data {tmp_path}/teacher --data {tmp_path}/teacher-held-out --output" in dry_run("train", teacher)
