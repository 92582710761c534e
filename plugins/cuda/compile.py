"""Compiles the CUDA kernels with nvcc to PTX, once per source text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from redraft.errors import install
from redraft.plugins.cuda.declaration import PLUGINS
from redraft.plugins.library import CACHE, COMPILED, BuildError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What a wheel has PTX and machine code for, and what kernels are reported for; ascending."""
FLAGS = ["-std=c++17", "-O3"]
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
REMEDY = (
    f"it compiles the CUDA kernels and needs no GPU. Install it with {install('build')} ({', '.join(PACKAGES)}), "
    "or set NVCC"
)


def sources() -> list[Path]:
    return sorted(PLUGINS.glob("operators/*/*.cu"))


def headers(source: Path) -> list[Path]:
    """Files that a source may include."""
    return [*sorted(PLUGINS.glob("*.h")), *sorted(PLUGINS.glob("cuda/*.cuh")), *sorted(source.parent.glob("*.cuh"))]


def ptx(source: Path, architecture: str = "sm_90") -> str:
    """The source's PTX, which later architectures run too: a wheel's, unless $NVCC names a compiler, or compiled once
    per source text. Raises BuildError."""
    shipped = [
        COMPILED / _name(source, capability)
        for capability in ARCHITECTURES
        if _number(capability) <= _number(architecture)
    ]
    if not os.environ.get("NVCC") and shipped and shipped[-1].exists():
        return shipped[-1].read_text()

    def compiled() -> str:
        with tempfile.TemporaryDirectory() as folder:
            run_nvcc([str(source), "-ptx", f"-arch={architecture}", "-o", f"{folder}/kernel.ptx"])
            return Path(folder, "kernel.ptx").read_text()

    return once(source, architecture, "ptx", compiled)


def image(source: Path, architecture: str) -> bytes:
    """What the driver loads: a wheel's machine code, which runs on its major architecture from its minor one on, or
    PTX, which the driver compiles first, in a container at every start. Raises BuildError."""
    same = [
        name
        for name in ARCHITECTURES
        if _number(name) <= _number(architecture) and _major(name) == _major(architecture)
    ]
    shipped = [COMPILED / _name(source, name, "cubin") for name in same]
    if not os.environ.get("NVCC") and shipped and shipped[-1].exists():
        return shipped[-1].read_bytes()
    return ptx(source, architecture).encode()


def assemble(code: Path, architecture: str, cubin: Path) -> None:
    """Write the machine code of a file of PTX. Raises BuildError."""
    run_tool([str(nvcc().with_name("ptxas")), f"-arch={architecture}", str(code), "-o", str(cubin)])


def compile_for_wheel(folder: Path, architectures: Sequence[str] = ARCHITECTURES) -> list[Path]:
    """Put the PTX and the machine code of all sources into a folder, under the names that `ptx` and `image` read.
    Raises BuildError."""
    files = []
    for source, architecture in product(sources(), architectures):
        code, cubin = (folder / _name(source, architecture, kind) for kind in ("ptx", "cubin"))
        code.write_text(ptx(source, architecture))
        assemble(code, architecture, cubin)
        files += [code, cubin]
    return files


@cache
def nvcc() -> Path:
    """The compiler: $NVCC, pip's, or the one in PATH. Raises BuildError."""
    chosen = os.environ.get("NVCC")
    paths = find_program("nvcc") if not chosen else [Path(chosen)] if shutil.which(chosen) else []
    if not paths:
        raise BuildError(f"nvcc not found{f' at NVCC={chosen}' if chosen else ''}: {REMEDY}")
    return paths[0]


@cache
def _version(compiler: Path) -> str:
    run = subprocess.run([str(compiler), "--version"], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(
            f"{compiler} --version failed with {run.returncode} ({(run.stdout + run.stderr).strip()}): {REMEDY}"
        )
    return run.stdout


def once(source: Path, architecture: str, kind: str, compiled: Callable[[], str]) -> str:
    """What the compiler makes of a source, kept by the source's text, its headers' and the compiler's version."""
    digest = hashlib.sha256(f"{FLAGS}{architecture}{_version(nvcc())}".encode() + source.read_bytes())
    for header in headers(source):
        digest.update(header.read_bytes())
    path = CACHE / _name(source, f"{architecture}-{digest.hexdigest()[:16]}", kind)
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(compiled())
        partial.rename(path)
    return path.read_text()


def _name(source: Path, architecture: str, kind: str = "ptx") -> str:
    return f"{source.parent.name}-{source.stem}-{architecture}.{kind}"


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


def _major(architecture: str) -> int:
    return _number(architecture) // 10


def find_program(program: str) -> list[Path]:
    """Path of one of CUDA's programs: pip's packages, PATH, CUDA's toolkit."""
    paths = [path for folder in sys.path for path in sorted(Path(folder).glob(f"nvidia/cu*/bin/{program}"))]
    others = (shutil.which(program), f"/usr/local/cuda/bin/{program}")
    return paths + [Path(path) for path in others if path and Path(path).exists()]


def run_nvcc(arguments: list[str]) -> str:
    return run_tool([str(nvcc()), *FLAGS, *arguments])


def run_tool(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{(run.stdout + run.stderr)[-4000:]}")
    return run.stdout + run.stderr
