"""A step ends in its own way when the command that runs it is asked to end, and never outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import typer

from redraft.cli.steps import Steps, one_process
from tests.conftest import ROOT, wait_until

STEP = """
import os, time
from redraft.console.interrupt import interruptible

@interruptible("step", "all is clean")
def main(*words):
    print(os.getpid(), flush=True)
    try:
        time.sleep(600)
    finally:
        time.sleep(1)
"""
APART = f"""
import sys
from redraft.cli.steps import run_to_end
from redraft.console.interrupt import interruptible

interruptible("command", "it goes on")(run_to_end)([sys.executable, "-c", {STEP + "main()"!r}])
"""
IN_ONE_PROCESS = """
from redraft.cli.steps import one_process
from redraft.console.interrupt import interruptible

with interruptible("command", "it goes on"), one_process() as execute:
    execute(["step"])
"""


@pytest.fixture(params=[pytest.param(APART, id="apart"), pytest.param(IN_ONE_PROCESS, id="one process")])
def running(request, tmp_path):
    """A command in a session of its own, as a terminal has it, and the process of its step."""
    (tmp_path / "sitecustomize.py").write_text(f"{STEP}\nimport redraft.cli\nredraft.cli.main = main\n")
    with subprocess.Popen(
        [sys.executable, "-c", request.param],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stdout is not None
        step = psutil.Process(int(command.stdout.readline()))
        yield command, step
        command.kill()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda command: os.killpg(command.pid, signal.SIGINT), id="Ctrl-C"),
        pytest.param(lambda command: command.send_signal(signal.SIGINT), id="SIGINT"),
        pytest.param(lambda command: command.send_signal(signal.SIGTERM), id="SIGTERM"),
    ],
)
def test_a_step_is_interrupted_in_its_own_way(running, ask: Callable[[subprocess.Popen], None]):
    command, step = running
    ask(command)
    _, errors = command.communicate(timeout=60)
    assert errors.split("\n") == ["", "step: interrupted, all is clean", "", "command: interrupted, it goes on", ""]
    assert command.returncode == 130
    assert not step.is_running()


def test_a_step_does_not_outlive_its_command(running):
    command, step = running
    command.kill()
    wait_until(lambda: not step.is_running() or step.status() == psutil.STATUS_ZOMBIE)


def test_one_process_runs_commands_until_one_kills_it(capfd):
    with one_process() as execute:
        assert [execute([*words]) for words in (["--version"], ["stop", "--no-such-option"], ["inspect"])] == [0, 2, 2]
        (process,) = (child for child in psutil.Process().children() if "redraft.cli.steps" in child.cmdline())
        process.kill()
        assert execute(["--version"]) == -signal.SIGKILL
    assert "No such option: --no-such-option" in capfd.readouterr().err


def test_an_interrupt_while_a_command_is_imported_is_one_line():
    code = "import signal; from redraft import cli; cli.application = lambda _: signal.raise_signal(signal.SIGTERM); "
    done = subprocess.run([sys.executable, "-c", code + 'cli.main("train")'], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nredraft train: interrupted, before it began\n")


def test_a_log_on_a_full_disk_hides_no_error(capfd):
    """The command that fails there says so, and not its log."""
    steps = Steps("redraft drafter", Path("/dev/full"), execute=lambda words: 2)
    with pytest.raises(typer.Exit):
        steps.run("train")
    assert capfd.readouterr().err.splitlines()[-1].startswith("redraft drafter: `redraft train` ended with status 2")
