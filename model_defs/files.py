"""The files of models and drafters: read with messages that name the file, written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from redraft.whole_file import OF_SAFETENSORS, remove_stale, whole_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model*.bin", "pytorch_model.bin.index.json"
"""Weights in torch's format, in one file or in shards."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantized."""
CHUNK = 1 << 22
"""Numbers of a tensor that are converted at once."""
MOST_JSON = 1 << 27
"""Bytes of a JSON file: an index of a model with a million tensors has fewer."""
POINTER = b"version https://git-lfs"
"""The beginning of what git leaves of a large file where git-lfs did not fetch it."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, or ValueError for anything else."""
    try:
        size = file.stat().st_size
        if not file.is_file() or size > MOST_JSON:  # a device or a pipe could be read for ever
            raise ValueError(f"{file}: expected a file of at most {MOST_JSON} bytes")
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist") from None
    except NotADirectoryError:
        raise ValueError(f"{file.parent} is a file, expected a folder with {file.name}") from None
    except RecursionError:
        raise ValueError(f"{file}: not JSON that is read here (it is nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return value


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises FileNotFoundError, or ValueError for a truncated or corrupted one."""
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with a model folder's weights: `model.safetensors`, the shards that the index names, or,
    where there is neither, all of them.

    Raises FileNotFoundError where there is none or a shard is missing, ValueError for a damaged index.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        if files := sorted(folder.glob("*.safetensors")):
            return files
        raise FileNotFoundError(f"{folder}: no .safetensors file" if folder.is_dir() else f"{folder} does not exist")
    return _shard_files(folder / INDEX)


def pickled_files(folder: Path) -> list[Path]:
    """The files with a folder's weights in torch's format, none where it has no such.

    Raises FileNotFoundError where a shard is missing, ValueError for a damaged index.
    """
    return _shard_files(folder / PICKLED_INDEX) if (folder / PICKLED_INDEX).exists() else sorted(folder.glob(PICKLED))


def shards(index: Path) -> list[str]:
    """The files that an index names, as it does. Raises ValueError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected a `weight_map` from tensors to files")
    return sorted({_inside(index, name) for name in weight_map.values()})


def _shard_files(index: Path) -> list[Path]:
    """The files that an index names. Raises as `weight_files`."""
    files = [index.parent / name for name in shards(index)]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing; {index.name} names it")
    return files


def _inside(index: Path, name: object) -> str:
    """A file's name in an index. Raises ValueError for one that leads out of the folder; links in the folder may, as
    they do in the hub's cache."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{index} names {name!r}, expected a file in its folder")
    return name


def require_finite(tensor: Tensor, name: str, file: Path) -> None:
    """Raise ValueError, which names the tensor, for a weight with NaN or infinity in it."""
    if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        rows = (~tensor.isfinite()).reshape(len(tensor) if tensor.ndim else 1, -1).any(1).nonzero().flatten()
        raise ValueError(
            f"{file}: {name} holds NaN or infinity in {len(rows)} of its rows, the first of which is {int(rows[0])}: "
            "the file is damaged, or its training diverged"
        )


def unreadable(file: Path, why: str) -> str:
    """What to say of a file that cannot be read: that it is a git-lfs pointer, or else `why`."""
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            return f"{file} is a git-lfs pointer to a file that was not fetched: `git lfs pull` in its folder does it"
    return why


class StoredTensors:
    """The tensors of several safetensors files, of which only the headers are read until a tensor is asked for."""

    def __init__(self, opened: Mapping[str, Any]):
        self._opened = opened

    @classmethod
    @contextmanager
    def open(cls, files: Iterable[Path]) -> Iterator[StoredTensors]:
        """While the files are open. Raises as `read_tensors` does."""
        with ExitStack() as stack:
            opened = [stack.enter_context(_opened(file)) for file in files]
            yield cls({name: tensors for tensors in opened for name in tensors.keys()})  # noqa: SIM118

    def shapes(self) -> dict[str, Tensor]:
        """Tensors of device "meta", of every tensor's shape and dtype, by name. The files are mapped and not read."""
        return {name: file.get_tensor(name).to("meta") for name, file in self._opened.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        return self._opened[name].get_tensor(name)


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first dimension, each of about CHUNK numbers and at least one row."""
    rows, *rest = shape
    step = max(CHUNK // max(math.prod(rest), 1), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def load_pickled(file: Path, device: str = "cpu", mmap: bool = False) -> dict[str, Tensor]:
    """The tensors of a file in torch's format, of which no code is run; with `mmap` they are mapped, unless the file is
    of the format before torch 1.6, which cannot be. Raises ValueError for anything else in it."""
    content = load_pickled_object(file, device, mmap)
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{file}: expected tensors by name")
    return content


def load_pickled_object(file: Path, device: str = "cpu", mmap: bool = False) -> Any:
    """What a file in torch's format holds: tensors, texts, numbers, and lists and mappings of them. Raises as
    `load_pickled`."""
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=mmap and zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        why = f"{file} holds more than tensors, and reading it would run its code: convert it to safetensors elsewhere"
        raise ValueError(unreadable(file, why)) from None
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(unreadable(file, f"{file}: truncated or corrupted ({str(error).splitlines()[0]})")) from None


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whole or not at all, with the permissions that the umask leaves to any new file.

    safetensors itself writes files that only their owner can read, and its errors name none. Raises OSError that names
    the file.
    """
    remove_stale(file.parent, OF_SAFETENSORS)
    with whole_file(file) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(dict(tensors), partial, None if metadata is None else dict(metadata))
        except SafetensorError as error:
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number) if found else str(error)) from None
        partial.chmod(mode)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(unreadable(file, f"{file}: truncated or corrupted ({error})")) from None
