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
