"""What make would do, by its dry run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_engines import PRECISIONS
from redraft.serving import ranks
from redraft.serving.processes import ServingError
from tests.conftest import ROOT


def dry_run(*arguments: str) -> str:
    """The commands where nothing has been built."""
    command = ["make", "--dry-run", "ENGINES=nowhere", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("arguments", [(), ("TP=1",)])
def test_one_rank_is_started_without_mpi(arguments):
    commands = dry_run("engines", "serve", *arguments)
    assert "-redrafter-bf16\n" in commands
    assert not any(word in commands for word in ("--tensor-parallel", "mpiexec", "-tp1"))


def test_bundles_for_two_ranks_have_names_of_their_own():
    commands = dry_run("engines", "serve", "TP=2")
    for kind in ("redrafter", "ar"):
        assert f"-{kind}-bf16-tp2\n" in commands
        assert f"-{kind}-bf16\n" not in commands
    assert commands.count("--tensor-parallel 2") == 2
    assert "mpiexec.gforker -n 2 .venv/bin/python build/tune.py" in commands


def test_help_names_every_backends_precisions():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    for backend, precisions in PRECISIONS.items():
        assert f"{backend} {' '.join(precisions)}" in said


def test_several_ranks_without_mpi_are_told_what_serving_says(tmp_path, monkeypatch):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("requirements.txt", "requirements-gpu.txt", "requirements-triton.txt", ".venv/.setup"):
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
