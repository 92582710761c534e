"""Hugging Face folders: safetensors, or PyTorch files that are read as tensors only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler.checkpoints.source import FetchError, load_tokenizer, row_blocks
from model_defs.files import StoredTensors, read_json, weight_files
from model_defs.target.config import TargetConfig
from model_defs.target.model import weight_names

PICKLED = "pytorch_model*.bin"
SETTINGS = "generation_config.json"


class FolderCheckpoint:
    """One folder with `config.json` and weights; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, folder: Path, title: str):
        """Read the configuration and the headers of the weights.

        Raises FetchError for a folder without a model or with damaged files, UnsupportedModelError.
        """
        if not (folder / "config.json").is_file():
            raise FetchError(f"{folder} is not a model folder: it has no config.json")
        self.folder, self.title = folder, title
        self.config = read_json(folder / "config.json")
        wanted = weight_names(TargetConfig.load(folder))
        self._files: dict[str, Path] = {}
        self._meta: dict[str, Tensor] = {}
        for file in _weight_files(folder):
            for name, tensor in _headers(file).items():
                if name in wanted:
                    self._files[name], self._meta[name] = file, tensor
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in self._meta.values()}
        self.precision = ", ".join(sorted(dtypes))
        if wrong := [name for name, tensor in self._meta.items() if not tensor.is_floating_point()]:
            raise FetchError(f"{folder}: {wrong[0]} is {self._meta[wrong[0]].dtype}, expected floating point")
        pickled = [file.stat().st_size for file in self._files.values() if file.suffix != ".safetensors"]
        self.memory = max((*pickled, *(tensor.nbytes for tensor in self._meta.values())), default=0)

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return self._meta

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as blocks [rows, ...] of the stored dtype. The file is mapped while one tensor is read."""
        weight = _read(self._files[name], name)
        return (weight[rows] for rows in row_blocks(tuple(weight.shape)))

    def tokenizer(self) -> Any:
        """The folder's tokenizer."""
        return load_tokenizer(self.folder)

    def copy_settings(self, folder: Path) -> None:
        """Copy `generation_config.json`, which may name more end tokens than `config.json`."""
        if (self.folder / SETTINGS).exists():
            shutil.copyfile(self.folder / SETTINGS, folder / SETTINGS)


def _weight_files(folder: Path) -> list[Path]:
    try:
        return weight_files(folder)
    except FileNotFoundError as error:
        if pickled := sorted(folder.glob(PICKLED)):
            return pickled
        raise FetchError(f"{error} (and no {PICKLED}): expected a model folder with its weights") from None


def _headers(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with StoredTensors.open([file]) as stored:
            return stored.shapes()
    return {name: tensor.to("meta") for name, tensor in _load_pickled(file).items()}


def _read(file: Path, name: str) -> Tensor:
    if file.suffix == ".safetensors":
        with StoredTensors.open([file]) as stored:
            return stored.read(name)
    return _load_pickled(file)[name]


def _load_pickled(file: Path) -> dict[str, Tensor]:
    """A PyTorch file's tensors, mapped. Nothing but tensors is unpickled."""
    try:
        return torch.load(file, weights_only=True, mmap=True)
    except (RuntimeError, EOFError, ValueError) as error:
        raise FetchError(f"{file}: truncated or corrupt, or from before PyTorch 1.6 ({error})") from error
