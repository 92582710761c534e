"""The file of a shard of teacher data. The worker writes it as `redraft distill` does, without torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np

SHARDS, PARTIALS = "shard-*.safetensors", ".shard.*.partial"
"""The names of shards, and of those that are being written."""
PROMPTS = "prompts"
"""The entry of a served shard that tells its documents' prompts apart: int64 [documents], see `prompt_hash`."""
SOURCE, SERVED = "source", "served"
"""The metadata of a shard that say where it is from, and what they say of a served one."""
FINGERPRINT = "target_fingerprint"
"""The metadata of a served shard that say of which target it is."""
MOST_HEADER = 1 << 16
"""Bytes of a shard's header: it describes five tensors."""
_NAMES = {"int32": "I32", "int64": "I64", "uint16": "BF16"}


def shard_bytes(
    tokens: Sequence[np.ndarray],
    features: Sequence[np.ndarray],
    prompts: Sequence[int],
    metadata: Mapping[str, str],
) -> bytes:
    """A shard of answers: the tokens int32 [n] of each, the bits of the bfloat16 features uint16 [n - 1, F] of all
    tokens but the last, whose row repeats the one before, and its prompt's hash."""
    offsets = np.concatenate([[0], np.cumsum([len(answer) for answer in tokens])]).astype(np.int64)
    rows = [np.concatenate([part, part[-1:]]) for part in features]
    return _serialized(
        {
            "tokens": np.concatenate(tokens).astype(np.int32),
            "hidden": np.concatenate(rows),
            "offsets": offsets,
            "answer_starts": offsets[:-1],
            PROMPTS: np.array(prompts, np.int64),
        },
        metadata,
    )


def _serialized(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file: the size of its header, the header in JSON, and the tensors one after the
    other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return b"".join((struct.pack("<Q", len(text)), text, *(tensor.tobytes() for tensor in tensors.values())))


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits uint16 of float32 values as the nearest bfloat16, of two equally near ones the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def prompt_hash(tokens: Sequence[int]) -> int:
    """64 bits by which the same prompt is found again, and which do not give it back."""
    digest = hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=8)
    return int(struct.unpack("<q", digest.digest())[0])


def add_shard(folder: Path, content: bytes) -> Path:
    """Write a shard after the last one of a folder, whole or not at all, for this user only (0600). Several processes
    may add to a folder. Raises OSError."""
    partial = folder / f".shard.{uuid4().hex}.partial"  # no process id: containers give out the same ones
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or the link could outlive a loss of power, and the content not
        names = (path.stem.rpartition("-")[2] for path in folder.glob(SHARDS))
        number = 1 + max((int(name) for name in names if name.isdecimal()), default=-1)
        while True:
            path = folder / f"shard-{number:08d}.safetensors"
            try:
                link_or_copy(partial, path)  # it fails where another process has taken the number
                return path
            except FileExistsError:
                number += 1
    finally:
        partial.unlink(missing_ok=True)


def link_or_copy(file: Path, new: Path) -> None:
    """Give a file a second name or, where the file system has no such links, a copy of the same age for this user only,
    whole unless the process is killed. Raises FileExistsError for a name that is taken, OSError."""
    try:
        new.hardlink_to(file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        with file.open("rb") as source:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as copy:
                    shutil.copyfileobj(source, copy)
                modified = os.fstat(source.fileno()).st_mtime_ns
                os.utime(new, ns=(modified, modified))
            except BaseException:
                new.unlink()
                raise


def is_of_others(path: Path) -> bool:
    """Whether a file is a whole shard that no service stored; not one that is gone. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            (size,) = struct.unpack("<Q", file.read(8))
            return bool(json.loads(file.read(min(size, MOST_HEADER)))["__metadata__"].get(SOURCE) != SERVED)
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False  # damaged, and of the service that had this folder
