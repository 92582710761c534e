"""Writes engine bundles: whole, or not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redraft.bundle.config import CONFIG, BundleConfig
from redraft.bundle.generation import GENERATION_CONFIG, GenerationConfig
from redraft.bundle.manifest import MANIFEST, BuiltFrom, FileEntry, Manifest, file_sha256
from redraft.chat import TEMPLATE_FILE, TEMPLATE_FOLDER
from redraft.errors import BundleError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE)

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
"""numpy reports a write that was cut short without a number."""


@contextmanager
def new_bundle(path: Path, bytes_needed: int) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends well, and vanishes otherwise.

    Raises BundleError where the disk has less than `bytes_needed` free, or fills up, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"cannot write {path}: {error.strerror}") from None
    free = shutil.disk_usage(path.parent).free
    if free < bytes_needed:
        raise BundleError(
            f"{path} needs about {bytes_needed / 1e6:.0f} MB of disk space, {path.parent} has {free / 1e6:.0f} MB free"
        )
    temporary = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno in _DISK_IS_FULL:
            raise BundleError(f"no space left on disk for {path} ({error}); nothing was kept") from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish_bundle(
    folder: Path,
    config: BundleConfig,
    versions: dict[str, str],
    target_fingerprint: str,
    command: str,
    built_from: BuiltFrom | None = None,
) -> None:
    """Write `config.json`, and the manifest of every file in the folder."""
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
    files = {
        str(file.relative_to(folder)): FileEntry(sha256=file_sha256(file), size=file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = Manifest(
        files=files,
        versions=versions,
        cpu_features=list(config.backend.cpu_features),
        target_fingerprint=target_fingerprint,
        command=command,
        built_from=built_from,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Copy tokenizer, chat templates and defaults of sampling. Raises BundleError where the model has no
    `tokenizer.json`, or defaults that no request may have."""
    if not (model / "tokenizer.json").is_file():
        raise BundleError(f"{model} has no tokenizer.json")
    GenerationConfig.read(model)
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        if (model / name).is_file():
            shutil.copy2(model / name, folder / name)
    if (model / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(model / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
