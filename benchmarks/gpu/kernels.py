"""Are the CUDA kernels right on this GPU, clean under compute-sanitizer, and how much of the bandwidth do they reach?

    python -m benchmarks.gpu.kernels

Tree attention in bf16 and fp32 against its reference (fp32: also that a sequence has the same bits in a batch as
by itself); the same at small sizes under each tool of compute-sanitizer; then its times beside `torch.add`'s bandwidth
and the one that the maker gives. On the CPU the checks run at small sizes. `--launch` only launches the kernels, for a
profiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import console, run
from benchmarks.gpu.check_kernels import (
    CASES,
    SHAPES,
    add_bandwidth,
    attend,
    check_attention,
    make_batch,
    time_all,
)
from benchmarks.gpu.machine import Device, Output, describe, device_of, tool, write_report

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CHECKS = ["-m", "benchmarks.gpu.kernels", "--no-sanitizer", "--no-times", "--small"]
FAILED = 9
PEAK = {"H200": 4800, "H100 80GB HBM3": 3350, "A100-SXM4-80GB": 2039}
"""Gigabytes per second that the maker gives, by part of the device's name."""


def sanitize(program: str | None, tools: Sequence[str] = TOOLS, cases: Sequence[str] = ()) -> dict[str, Any]:
    """What each tool of compute-sanitizer says of the checks, in its last line; why not, where it is not there. `cases`
    are more arguments of the checks: which shapes and kinds of batches.

    Every tensor is an allocation of its own: in torch's pool a read beyond a tensor, or of a tensor that nothing has
    written, would find another one's memory.
    """
    if program is None:
        missing = (
            "compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin: it comes with CUDA's toolkit; "
            "--no-sanitizer leaves it out"
        )
        console.print(missing, markup=False)
        return {"missing": missing}
    said: dict[str, Any] = {}
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in tools:
        command = [program, "--tool", name, "--error-exitcode", str(FAILED), sys.executable, *CHECKS, *cases]
        with TemporaryDirectory() as folder:
            command += ["--output", str(Path(folder, "checks.json"))]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = (done.stdout + done.stderr).strip().splitlines()
        said[name] = {"clean": done.returncode == 0, "says": lines[-1] if lines else ""}
        console.print(f"{name}: {said[name]}", markup=False)
    return said


def launch(device: str, sequences: int, length: int, rows: int) -> None:
    """Execute tree attention of Llama 3 8B once: so many sequences with `length` cached and `rows` new rows each."""
    heads = SHAPES["Llama-3-8B"]
    attend(make_batch(heads, [length] * sequences, [rows] * sequences).to(device), heads)
    if device == "cuda":
        torch.cuda.synchronize()


def main(
    device: Device = "cuda",
    no_checks: Annotated[bool, typer.Option("--no-checks", help="Compare nothing with the reference.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Check small sizes, as on the CPU.")] = False,
    no_sanitizer: Annotated[bool, typer.Option("--no-sanitizer", help="Leave out compute-sanitizer.")] = False,
    no_times: Annotated[bool, typer.Option("--no-times", help="Leave out times and bandwidth.")] = False,
    tools: Annotated[list[str], typer.Option(help="Tools of compute-sanitizer to run.")] = list(TOOLS),
    shapes: Annotated[list[str], typer.Option(help="Models whose heads are checked.")] = list(SHAPES),
    cases: Annotated[list[str], typer.Option(help="Kinds of batches to check.")] = list(CASES),
    launched: Annotated[
        tuple[int, int, int] | None,
        typer.Option(
            "--launch", metavar="SEQUENCES LENGTH ROWS", help="Launch the kernels only; default: check and time them."
        ),
    ] = None,
    output: Output = None,
) -> int:
    """Returns 1 where a tool of compute-sanitizer complains, or where it is missing."""
    for name, values, known in (("tools", tools, TOOLS), ("shapes", shapes, SHAPES), ("cases", cases, CASES)):
        if unknown := {*values} - {*known}:
            raise typer.BadParameter(f"--{name} {' '.join(unknown)}: expected some of {', '.join(known)}")
    if launched:
        launch(device, *launched)
        return 0
    on_device = device_of(device, output, kernels=True)
    on_gpu = device == "cuda"
    report: dict[str, Any] = {}
    if not no_checks:
        report["attention"] = check_attention(device, small or not on_gpu, shapes, cases)
    if on_gpu and not no_sanitizer:
        chosen = ["--shapes", *shapes, "--cases", *cases]
        report["compute_sanitizer"] = sanitize(tool("compute-sanitizer"), tools, chosen)
    if on_gpu and not no_times:
        bandwidth = add_bandwidth()
        peak = next((rate for part, rate in PEAK.items() if part in describe(on_device)["name"]), None)
        report["bandwidth"] = {"add_gigabytes_per_second": bandwidth / 1e9, "peak_gigabytes_per_second": peak}
        report["timings"] = time_all(bandwidth, shapes)
    write_report(output, __file__, on_device, report)
    said = report.get("compute_sanitizer", {})
    return int("missing" in said or not all(tool["clean"] for tool in said.values()))


if __name__ == "__main__":
    run(main)
