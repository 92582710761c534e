"""What the scripts of this folder share: the device, what it is, timing, results beside the scripts. On a GPU:
not run."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.results import write_json


def add_device(parser: argparse.ArgumentParser, script: str) -> None:
    """`--device` and `--output`; results lie beside the script, unless they are the CPU's."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="default: beside the script")
    parser.set_defaults(script=Path(script))


def device_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """The device asked for; without it the command ends with the reason. On the CPU `--output` is required, as the
    figures beside the scripts are a GPU's; engines and child processes then see no GPU."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device that torch can use: run on a GPU machine with torch's CUDA build, or --device cpu")
    if args.device == "cpu" and not args.output:
        parser.error("--device cpu needs --output: the results beside the script are a GPU's")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device(args.device)


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and software."""
    found: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return found


def write_report(args: argparse.Namespace, report: dict[str, Any]) -> Path:
    """Write the results, and say where."""
    path = args.output or args.script.with_suffix(".json")
    write_json(path, report)
    return path


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call that waits for its results; the first two calls are left out."""
    samples = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - started))
    return median(samples[2:])
