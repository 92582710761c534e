"""Starts the ranks of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"


def run_ranks(count: int, *arguments: str | Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` on so many ranks, from the root; 0: without mpiexec."""
    launcher = [str(MPIEXEC), "-n", str(count)] if count else []
    command = [*launcher, sys.executable, *map(str, arguments)]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "build")))}
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | paths,
        stdin=subprocess.DEVNULL,
    )
