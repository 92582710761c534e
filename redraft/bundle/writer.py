"""Writes engine bundles: whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redraft.bundle.config import BundleConfig
from redraft.bundle.folder import CONFIG, MANIFEST, is_bundle
from redraft.bundle.generation import GENERATION_CONFIG, GenerationConfig
from redraft.bundle.manifest import BuiltFrom, FileEntry, Manifest, file_sha256
from redraft.chat import TEMPLATE_FILE, TEMPLATE_FOLDER
from redraft.errors import BundleError, why_no_folder
from redraft.whole_file import whole_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE)

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
"""numpy reports a write that was cut short without a number."""


def require_replaceable(path: Path, replaces: Callable[[Path], bool] = is_bundle) -> None:
    """Raises BundleError for a file, for a folder that holds something else than what may be replaced, and for a path
    below a file or at a link that leads nowhere, which nothing can be moved to."""
    if fault := why_no_folder(path.absolute().parent):
        raise BundleError(f"cannot write {path}: {fault}; choose another --output")
    try:
        if path.is_symlink() and not path.exists():
            raise BundleError(f"{path} is a link that leads nowhere: choose another --output, or remove it first")
        if not path.exists() or (path.is_dir() and (replaces(path) or not any(path.iterdir()))):
            return
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    kind = "holds other files, which would be deleted" if path.is_dir() else "is a file"
    raise BundleError(f"{path} {kind}: choose another --output, or remove it first")


@contextmanager
def new_bundle(path: Path, bytes_needed: int, replaces: Callable[[Path], bool] = is_bundle) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends well, and vanishes otherwise. A folder
    that is there is replaced where `replaces` says so of it.

    Raises BundleError for other folders, where another process writes to the same `path`, and where the disk has less
    than `bytes_needed` free, or fills up, or cannot be written.
    """
    require_replaceable(path, replaces)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"cannot write {path}: {error.strerror}") from None
    free = shutil.disk_usage(path.parent).free
    if free < bytes_needed:
        raise BundleError(
            f"{path} needs about {bytes_needed / 1e6:.0f} MB of disk space, {path.parent} has {free / 1e6:.0f} MB free"
        )
    old = path.with_name(f".{path.name}.old")
    try:
        with _claimed(path.with_name(f".{path.name}.partial"), path) as temporary:
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


@contextmanager
def _claimed(temporary: Path, path: Path) -> Iterator[Path]:
    """The folder `temporary`, empty, which no other process has until the block ends. It goes where the block fails.

    The lock is on the folder itself: it ends with its process, so that what a killed one left can be taken.
    """
    temporary.mkdir(exist_ok=True)
    folder = os.open(temporary, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"another process is writing {path}: wait until it has ended, and try again") from None
        try:
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
        except BaseException:
            # Not after a success: the folder has its new name, and another process may have begun one of the old name.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(folder)


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


def share_files(bundle: Path, other: Path) -> None:
    """Let a bundle's files be another bundle's where both hold the same bytes: the disk holds a target once, whatever
    drafters it is served with. This is safe: files of bundles are replaced, never written into."""
    files = Manifest.read(other).files
    for name, entry in Manifest.read(bundle).files.items():
        if files.get(name) == entry:
            with suppress(OSError):  # another file system, one without such links, or one that is only read
                _share_file(bundle / name, other / name, entry.sha256)


def _share_file(file: Path, other: Path, sha256: str) -> None:
    if not file.samefile(other):
        with whole_file(file) as partial:
            partial.hardlink_to(other)
            if file_sha256(partial) != sha256:  # it is damaged, or was built anew meanwhile
                raise OSError(errno.ESTALE, "other bytes")


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
