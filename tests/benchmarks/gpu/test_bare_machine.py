"""The scripts on a machine with torch, transformers and mpi4py but not the rest."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.machine import PACKAGES
from tests.benchmarks.gpu.conftest import ROOT, bare_environment

FILES = [file for file in (ROOT / "benchmarks/gpu").glob("*.py") if "def main(" in file.read_text()]
SCRIPTS = sorted({file.stem for file in FILES} - {"kit"})
"""The scripts for a GPU machine; the kit is made elsewhere."""
NEED_PACKAGES = {"engines": ["x"]}
"""Scripts that run bundles, with the arguments that they require."""


def run_bare(folder: Path, *command: str, without: tuple[str, ...] = ()) -> str:
    environment = {**os.environ, **bare_environment(folder, without), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_starts_without_what_is_packed(tmp_path):
    """Those that need a packed package say so in one line before they begin."""
    arguments = {
        name: ["--device", "cpu", "--output", str(tmp_path / "out"), *NEED_PACKAGES[name]] for name in NEED_PACKAGES
    }
    script = f"""
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from benchmarks.command import execute
for name in {SCRIPTS}:
    main = import_module("benchmarks.gpu." + name).main
    said = StringIO()
    with redirect_stderr(said):
        status = execute(main, {arguments}.get(name, ["--help"]))
    print(name, status, *said.getvalue().strip().splitlines()[-1:])
"""
    said = run_bare(tmp_path, "-c", script, without=PACKAGES).splitlines()
    missing = f"error: not installed here: {', '.join(PACKAGES)}. python -m benchmarks.gpu.kit makes wheels to carry"
    for name in SCRIPTS:
        if name in NEED_PACKAGES:
            assert f"{name} 2 {missing} (docs/gpu.md)" in said
        else:
            assert f"{name} 0" in said
