"""Ctrl-C in a program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from redraft.console.interrupt import interruptible

PROGRAM = """
import os, signal, time, typer
from redraft.console.interrupt import interruptible

@interruptible("brew", "the pot is empty")
def main(cups: int = 1) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

signal.signal(signal.SIGINT, signal.default_int_handler)
typer.run(main)
"""
NOTED = """
import signal
from redraft.console.interrupt import noted_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)
with noted_interrupts() as interrupted:
    before = interrupted.is_set()
    signal.raise_signal(signal.SIGINT)
    print(before, interrupted.is_set())
signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_is_noted_where_a_program_asks_for_it():
    ended = subprocess.run([sys.executable, "-c", NOTED], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "False True"
    assert ended.stderr.strip().endswith("KeyboardInterrupt"), "afterwards it interrupts as before"


def test_ctrl_c_is_one_line_and_status_130():
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "--cups", "3"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130
    assert ended.stderr.strip() == "brew: interrupted, the pot is empty"


def test_other_errors_pass():
    with pytest.raises(ValueError, match="cold"), interruptible("brew", ""):
        raise ValueError("cold")
