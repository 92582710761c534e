"""Answer a GPU's first questions, one after the other, each within its own time.

    python -m benchmarks.gpu.first_hour --minutes 30

The rows of `--list` run as commands of their own. Each is ended at its limit, and the next begins whatever came of it.
After each row FOLDER/first_hour.json (`--output FOLDER`) holds its verdict, its times, the end of its output and the
results of its scripts. The same command goes on with the rows that are not answered yet, last with those that ran
out of time: with `--minutes 9` as many as fit, the next call the rest. `--again` repeats rows; the bundles in `--work`
are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.gpu.machine import PACKAGES, absent, describe, obstacle, profilers_work, tool
from redraft.bound import bound
from redraft.engines.cuda import device as gpu

ROOT = Path(__file__).parents[2]
STATE = "first_hour.json"
TAIL = 16_000
"""Bytes of a command's output that are kept."""
OK, FAILED, TIMED_OUT, SKIPPED = "ok", "failed", "timed out", "skipped"
CPU_PATIENCE = 10
GRACE_S = 5
"""Between asking a command to end and killing it."""
PROFILED = ((1, 4096, 16), (32, 4096, 16), (32, 4096, 64))
"""Sequences, cached rows and new rows of what ncu looks at."""
METRICS = ("gpu__time_duration.sum", "dram__bytes.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
           "sm__throughput.avg.pct_of_peak_sustained_elapsed", "sm__warps_active.avg.pct_of_peak_sustained_active",
           "launch__registers_per_thread")  # fmt: skip
ANY_GPU = "REDRAFT_ANY_GPU"
"""See `redraft.engines.cuda.device.ANY_GPU`."""
console = Console(highlight=False)


@dataclass(frozen=True)
class Setting:
    """Where the rows run: `tiny` are sizes that a CPU computes in seconds."""

    device: str
    tiny: bool
    work: Path
    model: Path
    profilers: bool
    architecture: str | None = None
    """The GPU's, such as sm_90."""

    def script(self, name: str, *arguments: str, output: str = "") -> Command:
        """A script of this folder, with a result file of its own."""
        path = self.work / f"{output or name}.json"
        given = ("--device", self.device, "--output", str(path), *arguments)
        return Command((sys.executable, "-m", f"benchmarks.gpu.{name}", *given), path)


@dataclass(frozen=True)
class Command:
    """`result` is a JSON file that it writes."""

    arguments: tuple[str, ...]
    result: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A question, the minutes that its commands may take together, and what it needs."""

    question: str
    minutes: float
    commands: Callable[[Setting], list[Command]]
    minutes_unprofiled: float | None = None
    """Its minutes where profilers do not work, whose rows need less."""
    packages: tuple[str, ...] = ()
    profilers: bool = False
    model: bool = False
    optional: tuple[str, ...] = ()
    """Packages without which the row is left out, where those of `packages` are required."""

    def limit(self, setting: Setting) -> float:
        """Minutes here; on a CPU, which may have other work, more."""
        unprofiled = None if setting.profilers else self.minutes_unprofiled
        return (self.minutes if unprofiled is None else unprofiled) * (CPU_PATIENCE if setting.tiny else 1)

    def left_out(self, setting: Setting) -> str | None:
        """Why the row cannot be answered here."""
        if missing := absent(self.optional):
            return f"{', '.join(missing)} not installed: python -m pip install them"
        if self.profilers and setting.device == "cpu":
            return "profilers look at a GPU only"
        if self.profilers and not setting.profilers:
            return "ncu and compute-sanitizer do not reach the GPU here (gVisor)"
        if self.profilers and not tool("compute-sanitizer"):
            return "compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin: it comes with CUDA's toolkit"
        if self.model and not (setting.model / "source.json").is_file():
            return f"no model at {setting.model}: run redraft fetch, or name it with --model"
        return None


def compiling(setting: Setting) -> list[Command]:
    """The compiler's report, for this GPU only."""
    return [Command((sys.executable, "-m", "redraft.plugins.cuda.compile", setting.architecture or "sm_90"))]


def kernels(setting: Setting) -> list[Command]:
    """The kinds and shapes in which the kernels differ most: all of both do not fit the row's minutes."""
    cases = "--kinds trees rings norms --shapes Phi-3-mini Gemma-3-4B Llama-3-8B"
    return [setting.script("kernels", "--no-sanitizer", "--no-times", *cases.split())]


def gpu_tests(setting: Setting) -> list[Command]:
    """With no plugin but the repository's own: others of a machine may not fit its pytest."""
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return [Command((sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"), environment=own)]


def steps(setting: Setting) -> list[Command]:
    sizes = "--shape tiny --context 8 --batches 1 2 --rows 1 5 --repeats 1"
    full = "--shape llama-3.1-8b --context 1024 --batches 1 8 32 --rows 1 5 16"
    return [setting.script("llama_7b", "--no-drafters", *(sizes if setting.tiny else full).split())]


def attention(setting: Setting) -> list[Command]:
    timing = setting.script("kernels", "--no-checks", "--no-sanitizer", output="attention")
    ncu = tool("ncu")
    if not (ncu and setting.profilers and setting.device == "cuda"):
        return [timing]
    options = (ncu, "--clock-control", "none", "--kernel-name", "regex:tree_attention", "--metrics", ",".join(METRICS))
    return [
        timing,
        *(
            Command((*options, *setting.script("kernels", "--launch", *map(str, sizes)).arguments))
            for sizes in PROFILED
        ),
    ]


def scheduling(setting: Setting) -> list[Command]:
    sizes = "--shape tiny --streams 2 --prompt 4 --tokens 4 --nodes 3"
    return [setting.script("scheduling", *(sizes.split() if setting.tiny else ()))]


def sanitizer(setting: Setting) -> list[Command]:
    cases = ("--kinds", "rings", "norms", "--tools", "memcheck", "racecheck")
    return [setting.script("kernels", "--no-checks", "--no-times", *cases, output="sanitizer")]


def smollm2(setting: Setting) -> list[Command]:
    where = ("--model", str(setting.model), "--work", str(setting.work / "torch_backend"))
    sizes = "--parts build equality batches --batches 1 8 32 --num-prompts 16 --max-tokens 64 --warm-up 4"
    return [setting.script("torch_backend", *where, *sizes.split())]


def rtx(setting: Setting) -> list[Command]:
    """A tiny engine of TensorRT for RTX, on a GPU that it may not support."""
    bundle, any_gpu = str(setting.work / "rtx"), {ANY_GPU: "1"}
    build = (sys.executable, "-m", "redraft.cli", "build", "--backend", "tensorrt_rtx", "--model", str(setting.model))
    limits = "--no-drafter --precision fp16 --slots 2 --max-len 320 --max-tree 8 --prefill-chunk 16"
    times = setting.script("engines", bundle, "--repeats", "10")
    return [
        Command((*build, *limits.split(), "--output", bundle), environment=any_gpu),
        Command(times.arguments, times.result, any_gpu),
    ]


RTX_PACKAGES = ("tensorrt_rtx", "onnx_ir", "onnxscript")
ROWS = (
    Row("Do the kernels compile?", 1, compiling),
    Row("Are the kernels right?", 3, kernels),
    Row("Do the tests that need a GPU pass?", 3, gpu_tests, packages=(*PACKAGES, "pytest")),
    Row("Step times of a Llama-3.1-8B shape with random weights", 4, steps),
    Row("Attention timings, and three shapes under ncu", 3, attention, minutes_unprofiled=2),
    Row("The scheduler end to end on that shape", 4, scheduling, minutes_unprofiled=6, packages=PACKAGES),
    Row("SmolLM2: equality in fp32, speed-ups by batch", 6, smollm2, 8, packages=PACKAGES, model=True),
    Row("Are memcheck and racecheck content?", 3, sanitizer, profilers=True),
    Row("Does a tiny engine of TensorRT for RTX run?", 3, rtx, packages=PACKAGES, model=True, optional=RTX_PACKAGES),
)
"""The rows by number, in the order in which they run."""


def run_row(row: Row, setting: Setting, log: Path) -> dict[str, Any]:
    """What came of a row: its verdict, and of each command the exit status, seconds, end of output and result."""
    limit = 60 * row.limit(setting)
    begun, deadline = time.time(), time.monotonic() + limit
    entry: dict[str, Any] = {"question": row.question, "limit_s": limit, "begun": begun, "commands": []}
    statuses: list[int | None] = []
    for command in row.commands(setting):
        if command.result:
            command.result.unlink(missing_ok=True)
        started = time.monotonic()
        status = run(command, log, deadline - started)
        statuses.append(status)
        done: dict[str, Any] = {"command": " ".join(command.arguments[1:]), "exit_status": status}
        done |= {"seconds": time.monotonic() - started, "output": tail(log)}
        if command.result and command.result.is_file():
            done["result"] = json.loads(command.result.read_bytes())
        entry["commands"].append(done)
        if status is None:
            break
    entry["seconds"] = sum(done["seconds"] for done in entry["commands"])
    entry["verdict"] = TIMED_OUT if None in statuses else FAILED if any(statuses) else OK
    return entry


def run(command: Command, log: Path, seconds: float) -> int | None:
    """Run a command from the repository's root and return its exit status; None: it was ended after so many seconds.

    It has a process group of its own, all of which ends with it. It ends with this process too, however that ends.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **command.environment}
    with log.open("wb") as file:
        process = subprocess.Popen(
            bound([*command.arguments]),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command's process group."""
    for sent, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sent)
            process.wait(patience)


def tail(log: Path) -> str:
    """The end of what a command printed."""
    return log.read_bytes()[-TAIL:].decode(errors="replace")


def load_state(path: Path, machine: dict[str, Any] | None) -> dict[str, Any]:
    """What earlier calls found on this machine; on whichever it was where `machine` is None. Raises ValueError for a
    file of another machine or none of ours."""
    if not path.is_file():
        return {"machine": machine, "rows": {}}
    try:
        state = json.loads(path.read_bytes())
        found = name_of(state["machine"])
        known = all(entry["verdict"] for entry in state["rows"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        known, found = False, ""
    if not known:
        raise ValueError(f"{path} was not written by this script: choose another --output")
    if machine and found != name_of(machine):
        raise ValueError(f"{path} is of {found}, this is {name_of(machine)}: choose another --output")
    return state


def name_of(machine: dict[str, Any]) -> str:
    """The GPU's name, or the kind of device."""
    return str(machine.get("name", machine["device"]))


def pending(state: dict[str, Any], chosen: Sequence[int], again: Sequence[int]) -> list[int]:
    """The chosen rows that have no answer yet or are to be repeated; a row that was skipped may be possible now. Last
    those that ran out of time, which go on from what they kept."""
    verdicts = {int(number): entry["verdict"] for number, entry in state["rows"].items()}
    late = {number for number, verdict in verdicts.items() if verdict == TIMED_OUT}
    answered = {number for number, verdict in verdicts.items() if verdict != SKIPPED} - late
    return sorted((n for n in chosen if n not in answered or n in again), key=lambda n: n in late)


def run_rows(state: dict[str, Any], todo: Sequence[int], setting: Setting, minutes: float, path: Path) -> list[int]:
    """Answer rows in order as far as the minutes reach, writing the state after each; returns those not begun."""
    deadline, left = time.monotonic() + 60 * minutes, []
    for number in todo:
        row = ROWS[number]
        if reason := row.left_out(setting):
            state["rows"][str(number)] = {"question": row.question, "verdict": SKIPPED, "reason": reason}
        elif time.monotonic() + 60 * row.limit(setting) > deadline + GRACE_S:
            left.append(number)
            continue
        else:
            console.print(f"row {number}: {row.question} ({row.limit(setting):g} min at most)", markup=False)
            state["rows"][str(number)] = run_row(row, setting, setting.work / f"row-{number}.log")
        entry = state["rows"][str(number)]
        write_json(path, state)
        console.print(f"row {number}: {entry['verdict']} {entry.get('reason', '')}", markup=False)
    return left


def table(state: dict[str, Any], setting: Setting) -> Table:
    """All rows, with what is known of each."""
    shown = Table("The first half hour", ["row", "question", "minutes", "verdict", "seconds"])
    for number, row in enumerate(ROWS):
        entry = state["rows"].get(str(number), {})
        seconds = f"{entry['seconds']:.0f}" if "seconds" in entry else ""
        verdict = entry.get("reason") or entry.get("verdict", "")
        shown.rows.append([str(number), row.question, f"{row.limit(setting):g}", verdict, seconds])
    return shown


def stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 where a row of this call failed or ran out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(len(ROWS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=30, help="of this call; a row that does not fit is not begun")
    parser.add_argument("--rows", type=int, nargs="+", choices=numbers, default=list(numbers), help="some of them")
    parser.add_argument("--again", type=int, nargs="+", choices=numbers, default=[], help="repeat these")
    parser.add_argument("--list", action="store_true", help="show the rows and what is known, and end")
    parser.add_argument("--output", type=Path, default=Path("artifacts/gpu/first_hour"), help="folder of the results")
    parser.add_argument("--work", type=Path, default=Path("artifacts/gpu/work"), help="folder of bundles and logs")
    parser.add_argument("--model", type=Path, default=Path("artifacts/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--tiny", action="store_true", help="sizes of a CPU, to try the commands")
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda" and torch.cuda.is_available()
    architecture = gpu.architecture(torch.device("cuda")) if on_gpu else None
    folders = args.work.resolve(), args.model.resolve()
    setting = Setting(args.device, args.tiny, *folders, profilers_work(), architecture)
    path = args.output / STATE
    needed = dict.fromkeys(package for number in args.rows for package in ROWS[number].packages)
    if not args.list and (problem := obstacle(args.device, list(needed), kernels=True)):
        parser.error(problem)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        state = load_state(path, None if args.list else describe(torch.device(args.device)))
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        table(state, setting).show(console)
        return 0
    setting.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stop)
    todo = pending(state, args.rows, args.again)
    left = run_rows(state, todo, setting, args.minutes, path)
    table(state, setting).show(console)
    console.print(f"written to {path}")
    if left:
        console.print(f"rows {' '.join(map(str, left))}: not begun, their minutes do not fit; the same command goes on")
    ran = [state["rows"][str(number)]["verdict"] for number in todo if number not in left]
    return int(any(verdict in (FAILED, TIMED_OUT) for verdict in ran))


if __name__ == "__main__":
    sys.exit(main())
