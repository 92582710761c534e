"""Compiles the CUDA kernels with nvcc: PTX to embed, registers and spills. `python -m plugins.cuda.compile` reports.
On a GPU: not run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from plugins.cuda.declaration import PLUGINS
from plugins.library import CACHE, BuildError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FLAGS = ["-std=c++17", "-O3"]
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
REMEDY = (
    "it compiles the CUDA kernels and needs no GPU. Install it with pip install -r requirements.txt "
    f"({', '.join(PACKAGES)}), or set NVCC"
)


class Resources(NamedTuple):
    """What ptxas gave a kernel, per thread: registers, bytes of stack and of spills; bytes of shared memory a block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        """Whether anything lies in local memory, which a stack is too."""
        return bool(self.stack or self.spill_stores or self.spill_loads)


def sources() -> list[Path]:
    return sorted(PLUGINS.glob("*/*.cu"))


def headers(source: Path) -> list[Path]:
    """What a source may include."""
    return [*sorted(PLUGINS.glob("cuda/*.cuh")), *sorted(source.parent.glob("*.cuh"))]


def ptx(source: Path, architecture: str = "sm_90") -> str:
    """The source's PTX, which later architectures run too; compiled once per source text. Raises BuildError."""
    digest = hashlib.sha256(f"{FLAGS}{architecture}{_version(nvcc())}".encode() + source.read_bytes())
    for header in headers(source):
        digest.update(header.read_bytes())
    path = CACHE / f"{source.parent.name}-{source.stem}-{architecture}-{digest.hexdigest()[:16]}.ptx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        _nvcc([str(source), "-ptx", f"-arch={architecture}", "-o", str(partial)])
        partial.rename(path)
    return path.read_text()


def resources(source: Path, architecture: str) -> dict[str, Resources]:
    """Each kernel's resources on an architecture. Raises BuildError."""
    with tempfile.TemporaryDirectory() as folder:
        log = _nvcc([str(source), "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", f"{folder}/kernel.cubin"])
    return parse_resources(log)


def parse_resources(log: str) -> dict[str, Resources]:
    """From what `ptxas -v` prints."""
    blocks = re.findall(
        r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"\s+ptxas info\s*: Used (\d+) registers(.*)",
        log,
    )
    found = {}
    for name, stack, stores, loads, registers, rest in blocks:
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Resources(int(registers), int(stack), int(stores), int(loads), int(shared[1]) if shared else 0)
    return found


@cache
def nvcc() -> Path:
    """The compiler: $NVCC, pip's, or the one in PATH. Raises BuildError."""
    if chosen := os.environ.get("NVCC"):
        found = [Path(chosen)] if shutil.which(chosen) else []
    else:
        found = [path for folder in sys.path for path in sorted(Path(folder).glob("nvidia/cu*/bin/nvcc"))]
        found += [
            Path(path) for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if path and Path(path).exists()
        ]
    if not found:
        raise BuildError(f"nvcc not found{f' at NVCC={chosen}' if chosen else ''}: {REMEDY}")
    return found[0]


@cache
def _version(compiler: Path) -> str:
    run = subprocess.run([str(compiler), "--version"], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(
            f"{compiler} --version failed with {run.returncode} ({(run.stdout + run.stderr).strip()}): {REMEDY}"
        )
    return run.stdout


def _nvcc(arguments: list[str]) -> str:
    run = subprocess.run([str(nvcc()), *FLAGS, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"nvcc {' '.join(arguments)} failed:\n{(run.stdout + run.stderr)[-4000:]}")
    return run.stdout + run.stderr


def main() -> str | None:
    """Report every kernel on every architecture. Returns what is wrong: a kernel that spills, or no nvcc."""
    spilling = []
    print(f"{'kernel':<37} {'architecture':<12} {'registers':>9}", end="")
    print(f"  {'stack':>5}  {'spill stores':>12}  {'spill loads':>11}  {'shared memory':>13}, bytes")
    try:
        for source in sources():
            for architecture in ARCHITECTURES:
                for name, used in resources(source, architecture).items():
                    print(f"{name:<37} {architecture:<12} {used.registers:>9}", end="")
                    print(f"  {used.stack:>5}  {used.spill_stores:>12}  {used.spill_loads:>11}  {used.shared:>13}")
                    spilling += [f"{name} on {architecture}"] if used.spills else []
    except BuildError as error:
        return str(error)
    return f"registers spill to local memory: {', '.join(spilling)}" if spilling else None


if __name__ == "__main__":
    sys.exit(main())
