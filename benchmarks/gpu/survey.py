"""What this machine has: GPU, driver, compilers, profilers, packages, memory and disk.

python -m benchmarks.gpu.survey
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from benchmarks.gpu.machine import PACKAGES, add_device, describe, device_of, profilers_work, tool, write_report
from redraft.plugins.cuda.compile import nvcc
from redraft.plugins.library import BuildError

NAMES = (*PACKAGES, "torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "pytest", "mpi4py",
         "onnx", "onnx_ir", "onnxscript", "gguf", "tensorrt_rtx", "tensorrt_cu13")  # fmt: skip
TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "cuobjdump", "nvdisasm", "g++")


def version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def output(*command: str) -> str:
    """What a command prints; why it cannot be run, where it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def compiler() -> str:
    """nvcc's path and last line of version, or why there is none."""
    try:
        path = str(nvcc())
    except BuildError as error:
        return str(error)
    return f"{path}: {output(path, '--version').splitlines()[-1]}"


def survey() -> dict[str, Any]:
    """All of it but the device."""
    return {
        "kernel": platform.release(),
        "profilers_work": profilers_work(),
        "nvcc": compiler(),
        "tools": {name: tool(name) for name in TOOLS},
        "nvidia_smi": output("nvidia-smi", "-L"),
        "packages": {name: version(name) for name in NAMES},
        "cpus": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "free_disk_gb": shutil.disk_usage(".").free / 1e9,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    args = parser.parse_args(argv)
    report = {"machine": describe(device_of(parser, args)), **survey()}
    print(json.dumps(report, indent=1))
    print(f"written to {write_report(args, report)}")


if __name__ == "__main__":
    main()
