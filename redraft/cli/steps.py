"""Commands that consist of others: each step is a command, which is printed, and can be killed and run again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import TextIO

from rich.console import Console

from redraft.bound import bound
from redraft.cli.bundles import as_arguments, complete, needs_build, needs_calibration
from redraft.console.output import err, fail
from redraft.errors import BundleError

Execute = Callable[[list[str]], int]
"""Runs a command of `redraft`, given as its words, and returns its exit status. Raises KeyboardInterrupt where it was
interrupted."""

ASK_S = 0.5
"""How often it is asked whether a command may run."""


class Steps:
    """The steps of `program`, a command such as `redraft serve`, which a log tells too where there is one."""

    def __init__(self, program: str, log: Path | None = None, execute: Execute | None = None, console: Console = err):
        """`execute` None: each command is a process of its own. `console` shows the commands."""
        self.program, self._console = program, console
        self._log, self._execute = log, execute or execute_apart

    def log(self, text: str) -> None:
        """Write a line to the log, with the time. Where it cannot be written there is none: a step that fails says why
        itself."""
        with suppress(OSError):
            if self._log:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")

    def run(self, command: str, *arguments: object) -> None:
        """Run a command of `redraft`. Ends the process where it fails, and raises KeyboardInterrupt where it was
        interrupted."""
        words = [command, *map(str, arguments)]
        line = shlex.join(["redraft", *words])
        self._console.print(line, markup=False)
        self.log(line)
        try:
            status = self._execute(words)
        except KeyboardInterrupt:
            self.log(f"redraft {command} was interrupted")
            raise
        if status:
            self.log(f"redraft {command} ended with status {status}")
            fail(f"{self.program}: `redraft {command}` ended with status {status}; the same command goes on from there")

    def built_bundle(self, options: dict[str, str]) -> dict[str, str]:
        """Build the bundle of these options of `redraft build`, where that was not done. Returns all its options. A
        bundle of other files in the folder is replaced, unless the options name it."""
        replace = [] if {"--output", "--replace"} & options.keys() else ["--replace"]
        options = complete(options)
        if needs_calibration(options):
            self.run("calibrate", "--model", options["--model"])
            options = complete(options)
        try:
            build = needs_build(options)
        except BundleError as error:
            fail(f"{self.program}: {error}")
        if build:
            self.run("build", *as_arguments(options), *replace)
        return options


def always() -> bool:
    """Return True: a program may run."""
    return True


def execute_apart(words: list[str], may_run: Callable[[], bool] = always) -> int:
    """Run a command of `redraft` as a process of its own, stopped while it may not run."""
    return run_to_end([sys.executable, "-m", "redraft", *words], may_run)


def run_to_end(command: list[str], may_run: Callable[[], bool] = always) -> int:
    """Run a program until it has ended, and return its exit status; it does not outlive this process. It is stopped
    while it may not run, which is asked every ASK_S.

    An interrupt is for the program, which may have files to remove: it is passed on, and when the program has ended,
    KeyboardInterrupt is raised. What `may_run` raises interrupts it too, and is raised then.
    """
    # In a session of its own, or a terminal's Ctrl-C would come twice: from there and from here.
    process = subprocess.Popen(bound(command), start_new_session=True)
    interrupted = Event()
    return _wait(process, partial(_wait_pausing, process, may_run, interrupted), interrupted)


def _wait_pausing(process: subprocess.Popen[bytes], may_run: Callable[[], bool], interrupted: Event) -> int:
    """Wait for the exit status of a process, and stop it while it may not run; after an interrupt it may, to end. What
    `may_run` raises interrupts it, and is raised when it has ended."""
    stopped = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(ASK_S)
        try:
            stop = not (interrupted.is_set() or may_run())
        except BaseException:  # it never may again
            for number in (signal.SIGCONT, signal.SIGINT):
                _signal(process, number)
            process.wait()
            raise
        if stopped != stop:
            stopped = stop
            _signal(process, signal.SIGSTOP if stop else signal.SIGCONT)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def one_process() -> Iterator[Execute]:
    """Runs commands one after the other in one process: what one has imported, which takes seconds, the next has. It
    begins with the first command, and ends with the context."""
    ours, theirs = socket.socketpair()
    process: subprocess.Popen[bytes] | None = None
    try:
        with ours, theirs, ours.makefile() as answers:

            def execute(words: list[str]) -> int:
                nonlocal process
                if process is None:
                    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                    process = subprocess.Popen(bound(command), start_new_session=True, pass_fds=[theirs.fileno()])
                    theirs.close()  # or its end would not be seen here
                return _wait(process, partial(_ask, ours, answers, words, process))

            yield execute
    finally:
        if process:
            process.wait()


def _ask(connection: socket.socket, answers: TextIO, words: list[str], process: subprocess.Popen[bytes]) -> int:
    """Have that process run a command. Returns its status, or else that of the process, which has ended."""
    try:
        connection.sendall(json.dumps(words).encode() + b"\n")
        return int(answers.readline() or process.wait())
    except ConnectionError:
        return process.wait()


def execute_in_turn(connection: socket.socket) -> None:
    """What that process does: run the commands that come, and answer with their statuses."""
    from redraft.cli import main

    with connection, connection.makefile() as asked:
        for line in asked:
            try:
                main(*json.loads(line))
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            connection.sendall(b"%d\n" % status)


def _wait(process: subprocess.Popen[bytes], status_of: Callable[[], int], interrupted: Event | None = None) -> int:
    """Wait for an exit status, and pass interrupts on to the process meanwhile. `interrupted` is set by one."""
    interrupted = interrupted or Event()

    def leave_it_to_the_program(number: int, _: object) -> None:
        interrupted.set()
        process.send_signal(number)

    before = {number: signal.signal(number, leave_it_to_the_program) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = status_of()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted.is_set() or status in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    return status


if __name__ == "__main__":
    execute_in_turn(socket.socket(fileno=int(sys.argv[1])))
