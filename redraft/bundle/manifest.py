"""A bundle's manifest: what it was built from, and the digests by which its files are verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from redraft.bundle.backends import Backend
from redraft.bundle.config import FORMAT_VERSION, BundleConfig, Section, first_problem, read_json_object
from redraft.bundle.folder import MANIFEST
from redraft.errors import BundleError, how_to_rebuild


class FileEntry(Section):
    sha256: str
    size: int


class InputFile(FileEntry):
    """A file that a bundle was built from."""

    modified_ns: int
    """Its time of modification: a file with the same size and time is taken for the same."""


class BuiltFrom(Section):
    """What a bundle was built from, by which `redraft build` tells whether it is the one asked for."""

    options: dict[str, str]
    """The options of redraft build, but for those that name files; "" for those without a value."""
    files: dict[str, InputFile]
    """Files by option and name, such as `--model config.json`, wherever they are."""
    sources: str
    """sha256 of the code that exports and compiles."""


class Manifest(Section):
    """`manifest.json`: every file's digest, what built the bundle, and what it needs to run."""

    format_version: int = FORMAT_VERSION
    files: dict[str, FileEntry]
    versions: dict[str, str]
    cpu_features: list[str]
    target_fingerprint: str
    command: str
    built_from: BuiltFrom | None = None

    @classmethod
    def read(cls, bundle: Path) -> Manifest:
        """A bundle's manifest. Raises BundleError where there is none, or one of another format."""
        path = bundle / MANIFEST
        if not path.is_file():
            hint = "is not an engine bundle (it has no manifest.json)" if bundle.exists() else "does not exist"
            raise BundleError(f"{bundle} {hint}; `redraft build` builds one")
        raw = read_json_object(path)
        rebuild = how_to_rebuild(raw.get("command") or "")
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{bundle} has bundle format {raw.get('format_version')}, this version reads format "
                f"{FORMAT_VERSION}; {rebuild}"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise BundleError(f"{path} is corrupted: {first_problem(error)}; {rebuild}") from None

    @property
    def rebuild(self) -> str:
        """How to build the bundle again, for messages."""
        return how_to_rebuild(self.command)


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    path: Path
    config: BundleConfig
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and verify a bundle: every file of its manifest unchanged, and this CPU fit for it.

        Files that the manifest does not name (what a service has learned) are allowed. Raises BundleError.
        """
        manifest = Manifest.read(path)
        rebuild = manifest.rebuild
        if missing := lacking(manifest.cpu_features):
            raise BundleError(
                f"{path} was built for another CPU: it needs {missing}, which this CPU lacks; build one with "
                "--backend torch"
            )
        verify_files(path, manifest.files, rebuild)
        return cls(path, BundleConfig.read(path, rebuild), manifest)


def verify_files(path: Path, files: dict[str, FileEntry], rebuild: str) -> None:
    """Compare files with their manifest entries. Raises BundleError for the first that differs."""
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"{file} is missing; {rebuild}")
        if file.stat().st_size != entry.size:
            raise BundleError(
                f"{file} has {file.stat().st_size} bytes, expected {entry.size}: truncated or changed; {rebuild}"
            )
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: file_sha256(path / name), files)
        for (name, entry), digest in zip(files.items(), digests, strict=True):
            if digest != entry.sha256:
                raise BundleError(f"{path / name} is corrupted (its sha256 differs from the manifest's); {rebuild}")


def file_sha256(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_cpu(backend: Backend) -> None:
    """Raises BundleError where this machine's CPU lacks what a backend's engine needs."""
    if missing := lacking(backend.cpu_features):
        raise BundleError(f"--backend {backend} needs {missing}, which this CPU lacks: take --backend torch")


def lacking(features: Iterable[str]) -> str:
    """Those of the features that this machine's CPU does not have, in words; empty where it has all."""
    return ", ".join(sorted(set(features) - cpu_features()))


def cpu_features() -> set[str]:
    """The flags of this machine's CPU, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()
