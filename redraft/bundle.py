"""Engine bundles: one folder with what an engine needs, and a manifest by which it is verified."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from redraft.errors import BundleError

FORMAT_VERSION = 2
CONFIG, MANIFEST = "config.json", "manifest.json"
METHOD_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""What a method may be called: it is part of file names."""

Backend = Literal["openvino", "torch", "tensorrt", "tensorrt_rtx"]
Precision = Literal["fp32", "bf16", "int8", "fp16", "fp8"]
Form = Literal["plugin", "native"]
"""A target for TensorRT: with our attention kernels as plugins, or of TensorRT's own layers only."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetInfo(_Section):
    """The target's shape, as far as the run time needs it."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position: int


class ShardInfo(_Section):
    """What a rank of a tensor-parallel target has: KV heads of each layer, and columns of the logits."""

    num_kv_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)


class LimitsInfo(_Section):
    """Extents that are compiled in: `slots` sequences of at most `max_len` tokens, `max_tree` rows of a tree (its
    root included), and `prefill_chunk` prompt rows a step."""

    slots: int = Field(ge=1)
    max_len: int = Field(ge=2)
    max_tree: int = Field(ge=1)
    prefill_chunk: int = Field(ge=1)


class ContextInfo(_Section):
    """A drafter's context cache: as many slots as the target's, with `draft_rows` rows behind max_len for the nodes
    that a draft expands."""

    layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    draft_rows: int = Field(ge=0)
    from_text: bool = False
    """Whether the first token of a text has a row too, which follows no hidden state."""


class MethodInfo(_Section):
    """A method: what its drafter network is unrolled for, and how its drafts are used."""

    drafter: str | None
    construction: str | None
    beam_width: int
    beam_length: int
    candidates: int
    tree_budget: int
    ngram: bool
    verification: str
    levels: tuple[int, ...] = ()
    """Of a random construction: its draws at each level."""
    support: int = 0
    """Of a random construction: how many of the likeliest tokens it draws from at each node."""
    context: ContextInfo | None = None
    """None where the drafter keeps no context."""
    chain_levels: int = 0
    """Levels that the engine can draft again from the chain of a draft before; 0 where it cannot."""
    resample_above: int | None = None
    """Draft again from a chain where more than so many steps are left of it (Lyanna's r); null: never."""
    skip_above: int | None = None
    """Where more than so many are left, do not draft anew; null: always draft anew."""


class BundleConfig(_Section):
    """`config.json`. The first of the methods serves requests that name none; without any it decodes
    auto-regressively."""

    format_version: int = FORMAT_VERSION
    name: str
    backend: Backend
    precision: Precision
    target: TargetInfo
    limits: LimitsInfo
    methods: dict[Annotated[str, Field(pattern=METHOD_NAME)], MethodInfo]
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that execute the target together: see `target_folder`."""
    shards: tuple[ShardInfo, ...] = ()
    """By rank, where there are several."""
    form: Form | None = None
    """The target's form in engines of TensorRT."""
    alias: bool = False
    """Whether the plugins declare that they update caches in place, to a compiler that may copy for it."""

    @model_validator(mode="after")
    def _one_shard_for_each_rank(self) -> Self:
        expected = self.tensor_parallel if self.tensor_parallel > 1 else 0
        if len(self.shards) != expected:
            raise ValueError(f"{len(self.shards)} shards for {self.tensor_parallel} ranks: expected {expected}")
        return self

    @classmethod
    def read(cls, bundle: Path, rebuild: str = "rebuild it with build/build_engines.py") -> BundleConfig:
        """A bundle's `config.json`. Raises BundleError, which says how to `rebuild` it."""
        try:
            return cls.model_validate(_json(bundle / CONFIG))
        except ValidationError as error:
            raise BundleError(f"{bundle / CONFIG} is invalid: {_first(error)}; {rebuild}") from None

    @property
    def plugin_form(self) -> bool:
        """Whether a target for TensorRT is in plugin form."""
        return self.backend == "tensorrt" and self.form != "native"

    def kv_heads(self, rank: int) -> int:
        """KV heads of the target's cache on this rank."""
        return self.shards[rank].num_kv_heads if self.shards else self.target.num_kv_heads


class FileEntry(_Section):
    sha256: str
    size: int


class InputFile(FileEntry):
    """A file that a bundle was built from."""

    modified_ns: int
    """Its time of modification: a file with the same size and time is taken for the same."""


class BuiltFrom(_Section):
    """What a bundle was built from, by which build/ensure_bundle.py tells whether it is the one asked for."""

    options: dict[str, str]
    """The options of build/build_engines.py, but for those that name files; "" for those without a value."""
    files: dict[str, InputFile]
    """Files by option and name, such as `--model config.json`, wherever they are."""
    sources: str
    """sha256 of the code that exports and compiles."""


class Manifest(_Section):
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
            raise BundleError(f"{bundle} {hint}; build one with build/build_engines.py")
        raw = _json(path)
        rebuild = f"rebuild it with: {raw.get('command') or 'build/build_engines.py'}"
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{bundle} has bundle format {raw.get('format_version')}, this version reads format "
                f"{FORMAT_VERSION}; {rebuild}"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise BundleError(f"{path} is corrupted: {_first(error)}; {rebuild}") from None


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    path: Path
    config: BundleConfig
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and verify a bundle: every file of its manifest unchanged, and this CPU fit for it.

        Files that the manifest does not name (a budget table written later) are allowed. Raises BundleError.
        """
        manifest = Manifest.read(path)
        rebuild = f"rebuild it with: {manifest.command or 'build/build_engines.py'}"
        missing = sorted(set(manifest.cpu_features) - cpu_features())
        if missing:
            raise BundleError(
                f"{path} was built for another CPU: it needs {', '.join(missing)}, which this CPU lacks; "
                f"on this machine {rebuild}"
            )
        verify_files(path, manifest.files, rebuild)
        return cls(path, BundleConfig.read(path, rebuild), manifest)


def target_folder(bundle: Path, rank: int, ranks: int) -> Path:
    """Where the networks and weights of a rank's part of the target are."""
    return bundle / f"rank{rank}" if ranks > 1 else bundle


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


def cpu_features() -> set[str]:
    """The flags of this machine's CPU, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _json(path: Path) -> dict:
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise BundleError(f"{path} cannot be read ({error}); rebuild the bundle with build/build_engines.py") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{path} is no JSON object; rebuild the bundle with build/build_engines.py")
    return raw


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
