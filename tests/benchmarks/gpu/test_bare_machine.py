"""The scripts on a machine with torch, transformers, mpi4py and what the kit packs, but not the rest."""

import os
import subprocess
import sys

from tests.benchmarks.gpu.conftest import ROOT, bare_environment

SCRIPTS = sorted(file.stem for file in (ROOT / "benchmarks/gpu").glob("*.py") if "def main(" in file.read_text())


def test_every_script_starts_with_what_is_packed(tmp_path):
    code = f"""
from importlib import import_module
from benchmarks.command import execute
for name in {SCRIPTS}:
    if name != "kit":
        assert execute(import_module("benchmarks.gpu." + name).main, ["--help"]) == 0
"""
    environment = {**os.environ, **bare_environment(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Usage") == len(SCRIPTS) - 1


def test_the_tests_that_need_a_gpu_are_found_there(tmp_path):
    environment = {**os.environ, **bare_environment(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "xdist",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in (
        "tree_attention",
        "beam_step",
        "draft_rows",
        "fp8_linear",
        "add_norm",
        "silu_product",
        "sampling",
        "top_log_probs",
    ):
        assert f"test_{kernel}.py" in done.stdout
