"""What the scripts of this folder share: the device and its checks, timing, and results beside the scripts."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.figures.results import write_json
from redraft.engines.cuda import device as gpu
from redraft.errors import BundleError
from redraft.plugins.cuda.compile import nvcc
from redraft.plugins.library import BuildError

PACKAGES = ("psutil", "pydantic")
"""What bundles and the scheduler import besides torch, transformers and what these bring."""


def add_device(parser: argparse.ArgumentParser, script: str) -> None:
    """`--device` and `--output`; results lie beside the script, unless they are the CPU's."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="default: beside the script")
    parser.set_defaults(script=Path(script))


def device_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, packages: Sequence[str] = (), kernels: bool = False
) -> torch.device:
    """The device asked for. The command ends with the reason where it, one of `packages` or, for `kernels`, nvcc is
    missing. On the CPU `--output` is required, since the figures beside the scripts are a GPU's; engines and child
    processes then see no GPU."""
    if args.device == "cpu" and not args.output:
        parser.error("--device cpu needs --output: the results beside the script are a GPU's")
    if problem := obstacle(args.device, packages, kernels):
        parser.error(problem)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device(args.device)


def obstacle(device: str, packages: Sequence[str] = (), kernels: bool = False) -> str | None:
    """What keeps this machine from measuring on the device, in one line with the remedy."""
    if missing := absent(packages):
        remedy = "python -m benchmarks.gpu.kit makes wheels to carry (docs/gpu.md)"
        return f"not installed here: {', '.join(missing)}. {remedy}"
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device that torch can use: run on a GPU machine with torch's CUDA build, or --device cpu"
    try:
        gpu.require_capability(torch.device("cuda"), or_take="--device cpu")
        if kernels:
            nvcc()
    except (BundleError, BuildError) as error:
        return str(error)
    return None


def absent(packages: Iterable[str]) -> list[str]:
    """Those of the packages that cannot be imported here."""
    return [name for name in packages if not _importable(name)]


def _importable(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def tool(name: str) -> str | None:
    """The path of one of CUDA's programs."""
    return shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")


def profilers_work() -> bool:
    """Whether ncu and compute-sanitizer can reach the GPU: under gVisor, whose kernel says 4.4.0, they cannot."""
    return platform.release() != "4.4.0"


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
