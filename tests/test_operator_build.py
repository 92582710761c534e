"""The compilers of a command that ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import wait_until


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_command(tmp_path, monkeypatch, told):
    """They would go on in the folder that the next start compiles in. A compiler's own children, whose parent they
    are, do most of the work."""
    compiler, pids = tmp_path / "compiler", tmp_path / "pids"
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {pids}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("REDRAFT_PLUGIN_CACHE", str(tmp_path / "cache"))
    program = "from redraft.operator_build import build_apart; build_apart().wait()"
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) > 0)
    finally:
        command.send_signal(told)
        command.wait()
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()), timeout=30)
