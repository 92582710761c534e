"""The compilers of a command that ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from redraft import operator_build
from redraft.plugins import library
from redraft.plugins.library import BuildError
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
    program = "from redraft.operator_build import build_operators; build_operators()"
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) > 0)
    finally:
        command.send_signal(told)
        command.wait()
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()), timeout=30)


def test_what_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("REDRAFT_PLUGIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(operator_build, "are_built", lambda: False)
    with pytest.raises(BuildError, match=r"^.*g\+\+ not found: .*install g\+\+ 12 or newer$"):
        operator_build.build_operators()


def test_all_that_is_used_is_compiled_apart(tmp_path, monkeypatch):
    """It would catch an extension that a worker compiles in itself, for as long as it may take to be ready, and whose
    compiler it leaves where it is killed."""
    cached = tmp_path / library._digest("")[:16]
    cached.mkdir()
    monkeypatch.setattr(library, "CACHE", tmp_path)
    monkeypatch.setattr(library, "_fits", lambda: False)
    for version, name in (("2026.1", library.KERNELS), ("", library.KERNELS), ("2026.1", "extension.so")):
        monkeypatch.setattr(library, "_openvino_version", lambda version=version: version)
        monkeypatch.setattr(library, "_extension_name", lambda: "extension.so")
        (cached / name).touch()
        assert library.are_built() == (name == "extension.so" or not version)
