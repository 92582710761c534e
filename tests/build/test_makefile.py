"""What make would do, by its dry run."""

from __future__ import annotations

import subprocess

import pytest

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


def test_verify_compares_the_default_the_published_methods_and_every_pair():
    commands = dry_run("verify").replace("\\\n", "")
    for kind, methods in (("methods", "benchmarks/methods.toml"), ("lossless", "benchmarks/lossless.toml")):
        (built,) = [line for line in commands.splitlines() if f"--methods {methods}" in line]
        assert "--precision fp32" in built
        assert built.endswith(f"-{kind}-fp32")
    compared = [line for line in commands.splitlines() if "benchmarks.verify_lossless" in line]
    for kind, line in zip(("redrafter", "methods", "lossless"), compared, strict=True):
        assert f"-{kind}-fp32 " in line
    assert len({line.partition("--output")[2] for line in compared}) == 3


def test_bundles_for_two_ranks_have_names_of_their_own():
    commands = dry_run("engines", "serve", "TP=2")
    for kind in ("redrafter", "ar"):
        assert f"-{kind}-bf16-tp2\n" in commands
        assert f"-{kind}-bf16\n" not in commands
    assert commands.count("--tensor-parallel 2") == 2
    assert "mpiexec.gforker -n 2 .venv/bin/python build/tune.py" in commands
