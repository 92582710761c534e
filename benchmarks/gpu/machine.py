"""What the scripts of this folder share: the device and its checks, timing, and results beside the scripts."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.command import console
from redraft.engines.cuda import device as gpu
from redraft.errors import BundleError
from redraft.loadtest.results import origin, write_json
from redraft.plugins.cuda.compile import nvcc
from redraft.plugins.library import BuildError

PACKAGES = ("psutil", "pydantic", "prometheus_client")
"""What bundles and the scheduler import besides torch, transformers and what these bring."""


DeviceName = Literal["cuda", "cpu"]
Device = Annotated[DeviceName, typer.Option(help="Where to run; the CPU only tries a script.")]
Output = Annotated[Path | None, typer.Option(help="JSON file to write; default: beside the script.")]


def device_of(
    device: DeviceName, output: Path | None, packages: Sequence[str] = (), kernels: bool = False
) -> torch.device:
    """Return the device asked for. Raises typer.BadParameter where it, one of `packages` or, for `kernels`, nvcc is
    missing. On the CPU `output` is required, since the figures beside the scripts are a GPU's; engines and child
    processes then see no GPU."""
    if device == "cpu" and not output:
        raise typer.BadParameter("--device cpu needs --output: the results beside the script are a GPU's")
    if problem := obstacle(device, packages, kernels):
        raise typer.BadParameter(problem)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device(device)


def obstacle(device: str, packages: Sequence[str] = (), kernels: bool = False) -> str | None:
    """What keeps this machine from measuring on the device, in one line with the remedy."""
    if missing := absent(packages):
        remedy = "python -m benchmarks.gpu.kit makes wheels to carry (docs/developers/gpu.md)"
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


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and software."""
    result: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        result |= {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return result


def write_report(output: Path | None, script: str, device: torch.device, report: dict[str, Any]) -> None:
    """Write the results with the machine they are of, by default beside the script, and print where."""
    path = output or Path(script).with_suffix(".json")
    write_json(path, origin(describe(device)) | report)
    console.print(f"written to {path}")


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call that waits for its results; the first two calls are left out."""
    samples = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - started))
    return median(samples[2:])
