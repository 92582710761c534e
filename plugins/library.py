"""The operators' C++ libraries: a wheel's own, or built with g++ once per source text and OpenVINO version."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TextIO

PLUGINS = Path(__file__).resolve().parent
COMPILED = PLUGINS / "compiled"
"""What a wheel holds compiled: the libraries, for one version of OpenVINO, and the CUDA kernels' PTX."""
KERNELS = "libredraft_kernels.so"
HOST_ONLY = ("operators/sampling", "trees")
"""Folders of what the host calls and no network: a bundle does not depend on them."""
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
INSTRUCTION_SETS = {
    "avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512, "avx512vnni": AVX512_VNNI, "avx512bf16": AVX512_BF16, "amx": AMX,
}  # fmt: skip
SHARED = ["-shared", f"-Wl,-soname,{KERNELS}"]  # found beside the extension, wherever the folder moves
GENERIC_SOURCES = (
    *("pool", "check", "failure", "dispatch", "c_api", "layout"),
    *("../operators/all_reduce/exchange", "../trees/c_api"),
)


class BuildError(RuntimeError):
    """The operators could not be built; the message says what is missing or what the compiler said."""


def cache_folder() -> Path:
    """Folder of built libraries: `$REDRAFT_PLUGIN_CACHE`, else artifacts/plugins of a clone, else the user's cache."""
    if folder := os.environ.get("REDRAFT_PLUGIN_CACHE"):
        return Path(folder)
    if (PLUGINS.parent / "pyproject.toml").is_file():
        return PLUGINS.parent / "artifacts" / "plugins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft"


CACHE = cache_folder()


@cache
def kernels_path() -> Path:
    """`libredraft_kernels.so`: the kernels with a C ABI, built if need be. Raises BuildError."""
    return _folder() / KERNELS


def build() -> None:
    """Build all that this environment uses, if need be: the extension only where OpenVINO is. Raises BuildError."""
    kernels_path()
    if _openvino_version():
        extension_path()


def are_built() -> bool:
    """Whether `build` has nothing to do."""
    if _fits():
        return True
    library = _extension_name() if _openvino_version() else KERNELS
    return os.path.exists(_cached(_digest("")) / library)  # False where the folder may not be searched, too


def check_build() -> None:
    """Raises BuildError where `build` would have to compile, and lacks the compiler or the folder."""
    if not are_built():
        _compiler()
        _make_cache()


@cache
def extension_path() -> Path:
    """`libredraft_openvino.so`: what `openvino.Core().add_extension` takes, built if need be. Raises BuildError."""
    path = _folder() / _extension_name()
    if not path.exists():
        with _lock():
            if not path.exists():
                libs = str(_openvino() / "libs")
                _build_extension(path, [libs])
    return path


def compile_for_wheel(folder: Path) -> list[Path]:
    """Put both libraries into a folder. The extension looks for OpenVINO where it is beside `COMPILED` in
    site-packages."""
    shutil.copy2(_built(_digest("")) / KERNELS, folder)
    _build_extension(folder / _extension_name(), ["$ORIGIN/../../../openvino/libs"])
    return [folder / KERNELS, folder / _extension_name()]


def operators_digest() -> str:
    """Name the source text of the networks' operators: a network runs on the operators that it was lowered for."""
    return _digest("", {path for folder in HOST_ONLY for path in (PLUGINS / folder).iterdir()})[:16]


def _folder() -> Path:
    """The folder of the kernels, and of the extension once it is built: the wheel's, where that fits."""
    return COMPILED if _fits() else _built(_digest(""))


def _fits() -> bool:
    """Whether there is a wheel's library that fits OpenVINO, or any where OpenVINO is missing, as beside GPUs."""
    return (COMPILED / (_extension_name() if _openvino_version() else KERNELS)).exists()


def _cached(digest: str) -> Path:
    return CACHE / digest[:16]


def _extension_name() -> str:
    return f"libredraft_openvino-{_digest(_openvino_version())[:12]}.so"


def _openvino_version() -> str:
    try:
        return metadata.version("openvino")
    except metadata.PackageNotFoundError:
        return ""


def _openvino() -> Path:
    import openvino

    return Path(openvino.__file__).parent


def _digest(salt: str, without: Collection[Path] = ()) -> str:
    """A digest of flags, C++ sources but those `without`, and a salt."""
    digest = hashlib.sha256(f"{FLAGS}{INSTRUCTION_SETS}{SHARED}{salt}".encode())
    for path in sorted({*PLUGINS.rglob("*.h"), *PLUGINS.rglob("*.cpp")}.difference(without)):
        digest.update(f"{path.relative_to(PLUGINS)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class _lock:
    def __enter__(self) -> None:
        self.file = _make_cache()
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _make_cache() -> TextIO:
    """The open lock of the folder of built libraries, which is made."""
    try:
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(CACHE / "lock", "w")
    except OSError as error:
        raise BuildError(
            f"cannot keep the compiled CPU operators in {CACHE}: {error.strerror}; REDRAFT_PLUGIN_CACHE names another "
            "folder"
        ) from None


def _built(digest: str) -> Path:
    folder = _cached(digest)
    if not os.path.exists(folder):
        with _lock():
            if not folder.exists():
                temporary = folder.with_suffix(".partial")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                try:
                    _build_kernels(temporary)
                    temporary.rename(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _build_kernels(folder: Path) -> None:
    objects = [folder / f"{name.replace('/', '-')}.o" for name in (*INSTRUCTION_SETS, *GENERIC_SOURCES)]
    commands = [
        # GCC warns about its own AVX-512 headers.
        ["-c", "kernels_isa.cpp", "-Wno-maybe-uninitialized", f"-DREDRAFT_ISA_NAMESPACE={name}", *flags]
        for name, flags in INSTRUCTION_SETS.items()
    ] + [["-c", f"{name}.cpp"] for name in GENERIC_SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(lambda job: _compile([*job[0], "-o", str(job[1])]), zip(commands, objects, strict=True)))
    _compile([*SHARED, *map(str, objects), "-o", str(folder / KERNELS), "-pthread"])
    for path in objects:
        path.unlink()


def _build_extension(path: Path, search: Sequence[str]) -> None:
    """Build the extension beside the kernels; it looks for OpenVINO's libraries in the folders `search`."""
    temporary, openvino = path.with_suffix(".partial"), _openvino()
    libraries = [str(next((openvino / "libs").glob(f"lib{n}.so.*"))) for n in ("openvino", "openvino_onnx_frontend")]
    _compile(
        [
            *["-shared", "extension.cpp", f"-I{openvino / 'include'}"],
            *[*libraries, str(path.parent / KERNELS)],
            *[f"-Wl,-rpath,{folder}" for folder in ("$ORIGIN", *search)],
            *["-o", str(temporary)],
        ]
    )
    temporary.rename(path)


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise BuildError(
            f"{compiler} not found: the operators of the CPU, and drafting on the host, are compiled on first use; "
            "install g++ 12 or newer"
        )
    return compiler


def _compile(arguments: list[str]) -> None:
    compiler = _compiler()
    run = subprocess.run([compiler, *FLAGS, *arguments], cwd=PLUGINS / "cpu", capture_output=True, text=True)
    if "No space left on device" in run.stderr:
        raise BuildError(
            f"no space left to compile the CPU operators: free some in {CACHE} (REDRAFT_PLUGIN_CACHE names another) "
            f"and in {tempfile.gettempdir()}"
        )
    if run.returncode:
        raise BuildError(f"{compiler} {' '.join(arguments)} failed:\n{run.stderr[-4000:]}")
