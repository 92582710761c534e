"""The GPU that a process uses."""

from __future__ import annotations

from pathlib import Path

import torch

from redraft.bundle import BundleError

DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded."""


def device() -> torch.device:
    """The GPU. Raises BundleError that says what is missing: torch's CUDA build, the driver, or the device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.version.cuda is None:
        raise BundleError(
            "no CUDA device: this torch was built for the CPU; install its CUDA build with "
            "pip install -r requirements-gpu.txt"
        )
    if not DRIVER.exists():
        raise BundleError("no CUDA device: NVIDIA's driver is not installed, or not visible here (nvidia-smi shows it)")
    raise BundleError("no CUDA device is visible: see nvidia-smi, and CUDA_VISIBLE_DEVICES")


def capability(gpu: torch.device) -> str:
    """The GPU's compute capability, such as 9.0."""
    major, minor = torch.cuda.get_device_capability(gpu)
    return f"{major}.{minor}"


def free_bytes(gpu: torch.device) -> int:
    """Of the GPU's memory, what no process holds."""
    return torch.cuda.mem_get_info(gpu)[0]
