"""The machine, as times depend on it."""

from __future__ import annotations

import os
from pathlib import Path


def machine_name() -> str:
    """This machine's CPU model and the cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
