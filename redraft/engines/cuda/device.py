"""The GPU that a process uses."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from redraft.errors import BundleError, reinstall_torch

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""A file that exists where NVIDIA's driver is loaded, in containers too."""
DEVICES = Path("/dev")
"""The folder with a file `nvidia<number>` for each GPU that a process may use."""
OLDEST_DRIVER = 580
"""The first release for CUDA 13; `deploy/launch.py` has it too."""
OLDEST_CAPABILITY = (8, 0)
"""The first compute capability with what the CUDA kernels use: tensor cores for bf16. `deploy/launch.py` has it too."""
OLDEST_FOR = {"bf16": (8, 0), "fp8": (8, 9)}
"""The first compute capability with tensor cores for a precision; `deploy/launch.py` has it too."""
ANY_GPU = "REDRAFT_ANY_GPU"
"""The environment variable that, set to anything, lets a bundle load on a GPU that its library does not support."""
ON_CPU = "the CPU: --backend openvino, or torch with an empty CUDA_VISIBLE_DEVICES"
WITHOUT_GPU = "without a GPU, --backend tensorrt_rtx builds engines for another machine, and openvino's run on the CPU"


def device() -> torch.device:
    """The GPU. Raises BundleError that says what is missing and what to do: the driver, a device, a driver that is new
    enough, torch's CUDA build, or a device that torch may use."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise BundleError(f"no CUDA device: {_missing()}")


def describe(device: torch.device) -> str:
    """The device in words. Of the CPU, where torch or the driver are there for a GPU that CUDA_VISIBLE_DEVICES does not
    hide, also what keeps from one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    expected = not hidden and (DRIVER_FILE.exists() or torch.version.cuda is not None)
    return f"the CPU, without a GPU: {_missing()}" if expected else "the CPU"


def _missing() -> str:
    if not DRIVER_FILE.exists():
        return (
            f"NVIDIA's driver is not loaded: on a machine with a GPU install release {OLDEST_DRIVER} or later (for a "
            f"container on its host, and start it with --gpus all); {WITHOUT_GPU}"
        )
    if not any(DEVICES.glob("nvidia[0-9]*")):
        return f"NVIDIA's driver is loaded, but no GPU is visible: start the container with --gpus all; {WITHOUT_GPU}"
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER_FILE.read_text())
    if version and int(version[1].split(".")[0]) < OLDEST_DRIVER:
        return f"the driver is {version[1]}: CUDA 13 needs release {OLDEST_DRIVER} or later; install one"
    if torch.version.cuda is None:
        return f"this torch was built for the CPU, and PyPI's has CUDA: {reinstall_torch()}"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"torch sees none of this machine's GPUs, and CUDA_VISIBLE_DEVICES is {chosen}: see that nvidia-smi works, and "
        "name one there that nvidia-smi -L lists"
    )


def capability(gpu: torch.device) -> str:
    """The GPU's compute capability, such as 9.0."""
    major, minor = torch.cuda.get_device_capability(gpu)
    return f"{major}.{minor}"


def architecture(gpu: torch.device) -> str:
    """The GPU's name for nvcc, such as sm_90."""
    return f"sm_{capability(gpu).replace('.', '')}"


def require_capability(
    gpu: torch.device,
    purpose: str = "the CUDA kernels",
    oldest: tuple[int, int] = OLDEST_CAPABILITY,
    or_take: str = ON_CPU,
) -> None:
    """Raise BundleError, with the remedy, for a GPU that is too old for this purpose."""
    actual = capability(gpu)
    if tuple(map(int, actual.split("."))) < oldest:
        raise BundleError(
            f"{torch.cuda.get_device_name(gpu)} has compute capability {actual}: {purpose} need "
            f"{'.'.join(map(str, oldest))} or later; take a newer GPU, or {or_take}"
        )


def require_supported(gpu: torch.device, library: str, supported: Sequence[tuple[int, int]]) -> None:
    """Raise BundleError for a GPU whose compute capability is not among those that a library supports, unless
    ANY_GPU is set."""
    actual = capability(gpu)
    names = [".".join(map(str, version)) for version in supported]
    if actual not in names and not os.environ.get(ANY_GPU):
        raise BundleError(
            f"{torch.cuda.get_device_name(gpu)} has compute capability {actual}: {library} supports "
            f"{', '.join(names)}; build with --backend torch or tensorrt for this GPU, or set {ANY_GPU}=1 to try it"
        )


def require_precision(gpu: torch.device, precision: str, or_take: str = "build with --precision int8") -> None:
    """Raise BundleError, with the remedy, for a GPU without tensor cores for a bundle's precision."""
    if oldest := OLDEST_FOR.get(precision):
        require_capability(gpu, f"{precision} engines", oldest, or_take)


def free_bytes(gpu: torch.device) -> int:
    """Bytes of the GPU's memory that no process holds."""
    return torch.cuda.mem_get_info(gpu)[0]
