"""Are the CUDA kernels right on this GPU, clean under compute-sanitizer, and how much of the bandwidth do they reach?
Not run on a GPU yet.

    python -m benchmarks.gpu.kernels

Tree attention in bf16 and fp32 and beam packing against their references (fp32: also that a sequence has the bits that
it has alone); the same at small sizes under each tool of compute-sanitizer; then the times of tree attention beside a
copy's bandwidth and the one that the maker gives. On the CPU the checks run at small sizes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.gpu.machine import add_device, describe, device_of, write_report
from plugins.beam_packing.tensorrt_plugin import PACK_BEAMS
from plugins.cuda.check_on_gpu import check_all, copy_bandwidth, time_all
from plugins.cuda.launch import run
from redraft.decoding.packing import pack_beams

TOOLS = ("memcheck", "racecheck", "synccheck")
CHECKS = ["-m", "plugins.cuda.check_on_gpu", "--check-only", "--small"]
FAILED = 9
PEAK = {"H200": 4800, "H100 80GB HBM3": 3350, "A100-SXM4-80GB": 2039}
"""Gigabytes per second that the maker gives, by part of the device's name."""
console = Console()


def check_packing(batch: int, width: int, length: int, device: torch.device) -> None:
    """Raises ArithmeticError where the kernel's trees are not those of `redraft.decoding.packing`."""
    rng = np.random.default_rng(batch)
    roots, lengths = (rng.integers(0, 100, batch, dtype=np.int32) for _ in range(2))
    beams = rng.integers(0, 3, (batch, width, length), dtype=np.int32)
    log_probs = -np.sort(rng.random((batch, width, length), dtype=np.float32), axis=-1)
    expected = pack_beams(roots, beams, log_probs)
    inputs = [torch.from_numpy(array).to(device) for array in (roots, beams, log_probs, lengths)]
    tokens, parents, _, _, scores, sizes = (output.cpu().numpy() for output in run(PACK_BEAMS, inputs, {}))
    for b, size in enumerate(expected.sizes):
        pairs = (tokens, expected.tokens), (parents, expected.parents), (scores, expected.scores)
        if sizes[b] != size or not all(np.array_equal(found[b, :size], wanted[b, :size]) for found, wanted in pairs):
            raise ArithmeticError(f"packing {batch} x {width} x {length}: sequence {b} has another tree")


def sanitize(program: str | None) -> dict[str, Any]:
    """What each tool of compute-sanitizer says of the checks, in its last line; why not, where it is not there."""
    if program is None:
        return {
            "missing": "compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin: it comes with CUDA's toolkit"
        }
    said: dict[str, Any] = {}
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", str(FAILED), sys.executable, *CHECKS]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        said[tool] = {"clean": done.returncode == 0, "says": lines[-1] if lines else ""}
        console.print(f"{tool}: {said[tool]}", markup=False)
    return said


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 where a tool of compute-sanitizer complains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args(argv)
    device = device_of(parser, args)
    on_gpu = device.type == "cuda"
    report: dict[str, Any] = {"machine": describe(device), "attention": check_all(args.device, small=not on_gpu)}
    for sizes in ((1, 1, 1), (3, 6, 5), (7, 45, 5)):
        check_packing(*sizes, device)
    report["packing"] = "equal"
    if on_gpu and not args.no_sanitizer:
        found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        report["compute_sanitizer"] = sanitize(found)
    if on_gpu and not args.no_times:
        copy = copy_bandwidth()
        peak = next((rate for part, rate in PEAK.items() if part in report["machine"]["name"]), None)
        report["bandwidth"] = {"copy_gigabytes_per_second": copy / 1e9, "peak_gigabytes_per_second": peak}
        report["timings"] = time_all(copy)
    console.print(f"written to {write_report(args, report)}")
    tools = report.get("compute_sanitizer", {})
    return int(any(not tools[tool]["clean"] for tool in TOOLS if tool in tools))


if __name__ == "__main__":
    sys.exit(main())
