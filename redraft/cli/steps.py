"""Commands that consist of others: each step is a command, which is printed, and can be killed and run again."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from redraft.bound import bound
from redraft.cli.bundles import as_arguments, complete, needs_build, needs_calibration
from redraft.console.output import err, fail
from redraft.errors import BundleError


class Steps:
    """The steps of `program`, a command such as `redraft serve`, which a log tells too where there is one."""

    def __init__(self, program: str, log: Path | None = None):
        self.program = program
        self._log = log

    def log(self, text: str) -> None:
        """Write a line to the log, with the time."""
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")

    def run(self, command: str, *arguments: object) -> None:
        """Run a command of `redraft`. Ends the process where it fails, and raises KeyboardInterrupt where it was
        interrupted."""
        words = [command, *map(str, arguments)]
        line = shlex.join(["redraft", *words])
        err.print(line, markup=False)
        self.log(line)
        try:
            status = run_to_end([sys.executable, "-m", "redraft.cli", *words])
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


def run_to_end(command: list[str]) -> int:
    """Run a program until it has ended, and return its exit status; it does not outlive this process.

    An interrupt is for the program, which may have files to remove: it is passed on, and when the program has ended,
    KeyboardInterrupt is raised.
    """
    # In a session of its own, or a terminal's Ctrl-C would come twice: from there and from here.
    process, interrupted = subprocess.Popen(bound(command), start_new_session=True), False

    def leave_it_to_the_program(number: int, _: object) -> None:
        nonlocal interrupted
        interrupted = True
        process.send_signal(number)

    before = {number: signal.signal(number, leave_it_to_the_program) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted or status in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    return status
