"""Fill the disk and the shared memory of a service under six streams: they go on, and what cannot be done is said.

    python -m benchmarks.robustness.full --bundle BUNDLE

Runs in a mount namespace of its own, where the run directory and /dev/shm are small file systems: nothing else on the
machine is filled. Needs Linux with `unshare` and root, or user namespaces. Each of the two is filled beside a running
service, whose streams must end whole; then a process that needs it is killed, and must be back as soon as there is
space again; then a service is started without space, which must fail with the remedy and leave nothing. The exit
status is 1 where something is not so.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.command import BundleFolder, Report, console, run
from benchmarks.robustness import service
from benchmarks.robustness.faults import BACK_S, EVERY_S, LONGEST_S, Streams, Trial, Watch
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.serving import launcher
from redraft.serving.processes import SHARED_MEMORY, ServingError, is_alive, owned_processes

INSIDE = "REDRAFT_FULL_INSIDE"
"""Set in the process that has the namespace."""
SIZE_MB = 32
LARGE = {600_000: 400, 1_500_000: 413}
"""Sizes of prompts, and the statuses that they are refused with."""
FILL_S = 0.01
STATE_S = 3.0
"""What the state file says may be so old, once it can be written."""


@dataclass
class Case:
    """What came of a full file system. `wrong` is what is not as it should be, `said` the message."""

    name: str
    said: str = ""
    streams: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Nothing is free in the file system of a folder meanwhile: what somebody gives back is taken at once."""
    file, full, over = folder / "filler", threading.Event(), threading.Event()

    def fill(writer: io.FileIO) -> None:
        with writer:
            while not over.wait(FILL_S):
                for size in (2**20, 1):
                    with contextlib.suppress(OSError):
                        while writer.write(bytes(size)):
                            pass
                full.set()

    thread = threading.Thread(target=fill, args=(io.FileIO(file, "wb"),))
    thread.start()
    full.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.unlink()


def refused(name: str, place: Path, attempt: Callable[[], object]) -> Case:
    """What is tried without space must fail, and name the place and the remedy."""
    case = Case(name)
    try:
        with filled(place):
            attempt()
        case.wrong.append("it did not fail")
    except ServingError as error:
        case.said = str(error)
        missing = [word for word in (str(place), "free") if word not in case.said]
        case.wrong += [f"the message lacks {word!r}" for word in missing]
    return case


def running(trial: Trial, name: str, place: Path, seconds: float) -> Case:
    """Streams beside a full file system end whole."""
    case = Case(name)
    streams = Streams(trial.settings, trial.tokens)
    with filled(place):
        time.sleep(seconds)
        streams.stop()
    case.streams = streams.counts
    case.wrong += [f"{count} streams: {how}" for how, count in case.streams.items() if how != "whole"]
    return case


def worker_killed(trial: Trial, place: Path) -> Case:
    """A worker needs no disk to start again. The state file tells of it as soon as it can be written."""
    worker = service.worker_name(trial.ranks)
    with filled(place):
        fault = trial.inflict(worker, signal.SIGKILL)
    case = Case("disk: the worker is killed", streams=fault.streams, wrong=fault.wrong)
    time.sleep(STATE_S)
    if trial.state().phase != "ready" or worker not in service.processes(trial.state()):
        case.wrong.append(f"the state file says {trial.state().phase}, worker {trial.state().worker_pid}")
    return case


def large_requests(trial: Trial) -> Case:
    """Prompts that are too long go through the memory that Triton and its models share. They are refused, and end
    nobody."""
    case = Case("shared memory: large requests")
    before = trial.state().triton_restarts
    url = f"http://127.0.0.1:{trial.settings.http_port}/v2/models/ensemble/generate"
    with filled(SHARED_MEMORY):
        for size, status in LARGE.items():
            answer = httpx.post(url, json={"text_input": "a" * size, "max_tokens": 1}, timeout=LONGEST_S)
            case.said += f"{answer.status_code}: {answer.text[:100]} "
            if answer.status_code != status:
                case.wrong.append(f"status {answer.status_code} for {size} bytes, expected {status}")
        time.sleep(STATE_S)
    if restarts := trial.state().triton_restarts - before:
        case.wrong.append(f"{restarts} restarts of Triton")
    return case


def triton_killed(trial: Trial, seconds: float) -> Case:
    """Triton cannot start without shared memory. Health and state say so, and it is back when there is some."""
    case = Case("shared memory: Triton is killed")
    watch = Watch(trial.settings)
    try:
        victim = service.processes(trial.state())["Triton server"]
        with filled(SHARED_MEMORY):
            victim.kill()
            time.sleep(seconds)
            case.said = trial.state().detail
            if str(SHARED_MEMORY) not in case.said or "free" not in case.said:
                case.wrong.append(f"the state lacks the cause: {trial.state().phase} {case.said}")
            if not all(well for _, _, well in watch.seen["/v1"]):
                case.wrong.append("/v1 failed meanwhile")
        freed = time.monotonic()
        while not (trial.state().phase == "ready" and not is_alive(victim) and watch.well_since(freed)):
            if time.monotonic() > freed + LONGEST_S:
                break
            time.sleep(EVERY_S)
        if (took := time.monotonic() - freed) > BACK_S:
            case.wrong.append(f"back {took:.1f} s after there was space")
    finally:
        watch.stop()
    if lies := watch.lies(0.0):
        case.wrong.append(f"health was wrong {lies} times")
    return case


def cases(trial: Trial, seconds: float) -> Iterator[Case]:
    """All of them, one after the other. The service is stopped in the end."""
    disk = trial.run_dir.path
    yield running(trial, "disk: streams", disk, seconds)
    yield worker_killed(trial, disk)
    other = trial.settings.bundle
    yield refused("disk: swap", disk, lambda: launcher.swap(other, disk, lambda _: None))
    yield running(trial, "shared memory: streams", SHARED_MEMORY, seconds)
    yield large_requests(trial)
    yield triton_killed(trial, seconds)
    trial.stop()
    for name, place in (("disk: start", disk), ("shared memory: start", SHARED_MEMORY)):
        case = refused(name, place, trial.serve)
        case.wrong += [f"left: {one}" for one in owned_processes(disk)]
        trial.stop()
        yield case


def table(cases: list[Case]) -> Table:
    """One row per case."""
    result = Table("Full file systems", ["case", "streams", "said", "wrong"])
    for case in cases:
        streams = ", ".join(f"{how}: {count}" for how, count in sorted(case.streams.items()))
        result.rows.append([case.name, streams, case.said, "; ".join(case.wrong) or "-"])
    return result


def enter_namespace() -> None:
    """Run this program again with file systems of its own. Ends the process where it may not."""
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    command = ["unshare", *options, sys.executable, "-m", "benchmarks.robustness.full", *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode)


def mount(folder: Path) -> None:
    """A small file system in memory at a folder. Raises subprocess.CalledProcessError."""
    options = f"size={SIZE_MB}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def main(
    bundle: BundleFolder,
    port: Annotated[int, typer.Option(help="The first of four ports.")] = 18_200,
    seconds: Annotated[float, typer.Option(help="Seconds of streams beside each full file system.")] = 10.0,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    output: Report = Path("artifacts/reports/full.json"),
) -> int:
    """Returns 1 where something is wrong."""
    if INSIDE not in os.environ:
        enter_namespace()
    results: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="redraft-full-") as folder:
        for place in (SHARED_MEMORY, Path(folder)):
            mount(place)
        try:
            trial = Trial(bundle, Path(folder), port, stream_tokens)
            try:
                for case in cases(trial, seconds):
                    results.append(case)
                    console.print(f"{case.name}: {'; '.join(case.wrong) or 'well'}", markup=False)
            finally:
                left = trial.stop()
        except ServingError as error:
            raise typer.BadParameter(str(error)) from None
        finally:
            subprocess.run(["umount", folder], check=False)
    console.print(f"left after the stop: {', '.join(left) or 'nothing'}", markup=False)
    report = {"bundle": bundle.name, "cases": [vars(case) for case in results], "left": left}
    finish(output, report, table(results))
    return int(bool(left) or any(case.wrong for case in results))


if __name__ == "__main__":
    run(main)
