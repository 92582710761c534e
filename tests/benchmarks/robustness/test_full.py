"""What the script of full file systems makes of what it sees, and that it fills one; a service runs by hand only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.robustness import full as module
from redraft.serving.processes import ServingError

FILL = """
import os, sys, time
from pathlib import Path
from benchmarks.robustness.full import filled, mount
folder = Path(sys.argv[1])
mount(folder)
(folder / "other").write_bytes(bytes(2**20))
free = lambda: os.statvfs(folder).f_bfree
with filled(folder):
    assert free() == 0
    (folder / "other").unlink()
    deadline = time.monotonic() + 10
    while free():
        assert time.monotonic() < deadline
        time.sleep(0.01)
assert free() and not list(folder.iterdir())
"""


def fail(message: str) -> None:
    raise ServingError(message)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("/x is full: free some", []),
        ("/x is full", ["the message lacks 'free'"]),
        ("free some", ["the message lacks '/x'"]),
        (None, ["it did not fail"]),
    ],
)
def test_a_refusal_names_the_place_and_the_remedy(monkeypatch, message, wrong):
    monkeypatch.setattr(module, "filled", lambda _: contextlib.nullcontext())
    case = module.refused("start", Path("/x"), lambda: message and fail(message))
    assert (case.wrong, case.said) == (wrong, message or "")


@pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="may make no mount namespace",
)
def test_what_is_given_back_is_taken_at_once(tmp_path):
    subprocess.run(["unshare", "--mount", sys.executable, "-c", FILL, str(tmp_path)], check=True, timeout=60)
