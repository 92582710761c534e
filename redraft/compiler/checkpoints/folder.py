"""Hugging Face folders: safetensors, or PyTorch files that are read as tensors only."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.compiler.checkpoints.quantized import quantization_of
from redraft.compiler.checkpoints.source import FetchError, load_tokenizer
from redraft.compiler.checkpoints.wrapped import own_name, read_config
from redraft.model_defs.drafters.hub.folder import HubFolder
from redraft.model_defs.drafters.hub.readers import reader_of
from redraft.model_defs.files import (
    FLOATS,
    PICKLED,
    StoredTensors,
    load_pickled,
    pickled_files,
    row_blocks,
    weight_files,
)
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.model import HEAD, has_own_head, weight_names, weights_of

SETTINGS = "generation_config.json"
BASE = "model."
"""Before the names of all weights but the head's; some checkpoints leave it out (OPT of 6.7B and more)."""


class FolderCheckpoint:
    """One folder with `config.json` and weights; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, folder: Path, title: str):
        """Read the configuration and the headers of the weights.

        Raises FetchError for a folder without a model or with damaged files, UnsupportedModelError.
        """
        if not (folder / "config.json").is_file():
            raise FetchError(f"{folder} is not a model folder: it has no config.json")
        self.folder, self.title = folder, title
        self.files: dict[str, Path] = {}
        self.config = read_config(folder)
        try:
            self._quantization = quantization_of(self.config)
        except (TypeError, AttributeError, LookupError) as error:
            raise FetchError(
                f"{folder / 'config.json'}: quantization_config is not one that is read ({error})"
            ) from None
        self._files: dict[str, tuple[Path, str]] = {}
        self._stored: dict[str, Tensor] = {}
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        self._parts: set[str] = set()
        self.remarks: list[str] = []
        for file in _weight_files(folder):
            for name, tensor in _headers(file).items():
                whole = own_name(name)
                whole = whole if whole.startswith((BASE, "lm_head.")) else BASE + whole
                self._require_one(whole, file, name)
                self._files[whole], self._stored[whole] = (file, name), tensor
        try:
            target = TargetConfig.load(folder, self.config)
        except UnsupportedModelError:
            refuse_drafter(folder)
            raise
        wanted = weight_names(self._tied_as_stored(target))
        headers = {name: self._header(name) for name in wanted}
        self._meta = {name: tensor for name, tensor in headers.items() if tensor is not None}
        if len(self._meta) < len(wanted):
            refuse_drafter(folder)
        self._remark_unread(wanted)
        plain = {str(self._stored[name].dtype).removeprefix("torch.") for name in self._meta if not self._packed(name)}
        self.precision = self._quantization.title if self._quantization else ", ".join(sorted(plain))
        read = [self._stored[name].nbytes for name in self._meta if not self._packed(name)]
        unpacked = [3 * 4 * tensor.numel() for name, tensor in self._meta.items() if self._packed(name)]
        pickled = {file for file, _ in self._files.values() if file.suffix != ".safetensors"}
        self.memory = max((*(file.stat().st_size for file in pickled), *read, *unpacked), default=0)

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return self._meta

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as blocks [rows, ...] of the stored dtype, or float32 of a quantized one. The file is mapped
        while one tensor is read."""
        weight = self._dequantized(name, self._read) if self._packed(name) else self._of_file(*self._files[name])
        return (weight[rows] for rows in row_blocks(tuple(weight.shape)))

    def _require_one(self, whole: str, file: Path, name: str) -> None:
        """Raise FetchError where another file, or another name, has another weight in this one's place."""
        if whole in self._files and not torch.equal(self._of_file(file, name), self._of_file(*self._files[whole])):
            both = " and ".join(f"{name} in {file.name}" for file, name in (self._files[whole], (file, name)))
            raise FetchError(f"{self.folder} holds two different weights for one place: {both}")

    def _tied_as_stored(self, target: TargetConfig) -> TargetConfig:
        """The configuration of weights as transformers reads them: tied where embeddings and LM head are one, or one is
        missing, whatever `tie_word_embeddings` says beside two that differ."""
        (embedding,) = weights_of(target)["embedding.weight"].sources
        if target.tie_embeddings and embedding not in self._stored and HEAD in self._stored:
            self._files[embedding], self._stored[embedding] = self._files[HEAD], self._stored[HEAD]
        if not has_own_head(target, self._readable(embedding, HEAD), self._is_same):
            return target
        self.config = self.config | {"tie_word_embeddings": False}
        self.remarks.append(
            f"its config.json ties the LM head to the embeddings, and the weights hold another {HEAD}: it is read, as "
            "by transformers"
        )
        return replace(target, tie_embeddings=False)

    def _readable(self, *names: str) -> list[str]:
        """Those of these weights that the folder holds, quantized or not."""
        return [name for name in names if self._header(name) is not None]

    def _is_same(self, name: str, other: str) -> bool:
        pairs = zip_longest(self.blocks(name), self.blocks(other))
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)

    def _remark_unread(self, wanted: list[str]) -> None:
        """Say which tensors are left out. A head that equals the embeddings is read with them."""
        read = {*wanted, HEAD, *self._parts}
        unread = sorted(
            name for whole, (_, name) in self._files.items() if whole not in read and not name.endswith("inv_freq")
        )
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            self.remarks.append(f"no layer reads these weights, which are left out: {', '.join(unread[:3])}{more}")

    def _part(self, name: str) -> Tensor | None:
        """A part of a quantized weight as a meta tensor."""
        self._parts.add(name)
        return self._stored.get(name)

    def _packed(self, name: str) -> bool:
        """Whether a weight has to be dequantized."""
        stored = self._stored.get(name)
        return stored is None or stored.dtype not in FLOATS

    def _header(self, name: str) -> Tensor | None:
        """A wanted weight's shape as a meta tensor; None where the folder lacks it."""
        if not self._packed(name):
            if not (stored := self._stored[name]).ndim:
                raise FetchError(f"{self.folder}: {name} is a single number, expected rows")
            return stored
        if self._quantization is None:
            if name in self._stored:
                raise FetchError(f"{self.folder}: {name} is {self._stored[name].dtype}, expected floating point")
            return None
        try:
            return self._dequantized(name, self._part)
        except KeyError:
            return None

    def _dequantized(self, name: str, read: Callable[[str], Tensor | None]) -> Tensor:
        assert self._quantization is not None
        layer = name.removesuffix(".weight")
        try:
            return self._quantization.weight(lambda suffix: read(f"{layer}.{suffix}"))
        except FetchError as refusal:
            raise FetchError(f"{self.folder}: {layer}.{refusal}") from None
        except (IndexError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
            raise FetchError(
                f"{self.folder}: {layer} is not quantized as its tensors and quantization_config say together "
                f"({str(error).partition(chr(10))[0]})"
            ) from error

    def _read(self, name: str) -> Tensor | None:
        return self._of_file(*self._files[name]) if name in self._files else None

    def _of_file(self, file: Path, name: str) -> Tensor:
        if file.suffix == ".safetensors":
            with StoredTensors.open([file]) as stored:
                return stored.read(name)
        if file not in self._pickled:  # the last one is kept, as one of torch's old format is read as a whole
            self._pickled = {file: load_pickled(file, mmap=True)}
        return self._pickled[file][name]

    def tokenizer(self) -> Any:
        """The folder's tokenizer."""
        return load_tokenizer(self.folder)

    def copy_settings(self, folder: Path) -> None:
        """Copy `generation_config.json`, which may name more end tokens than `config.json`."""
        if (self.folder / SETTINGS).exists():
            shutil.copyfile(self.folder / SETTINGS, folder / SETTINGS)


def refuse_drafter(folder: Path) -> None:
    """Raise FetchError for a drafter of the hub, or ValueError for one that is not served, in a model's place."""
    hub = HubFolder(folder)
    if not hub.says("speculators_model_type") and any(name.startswith("mtp") for name in hub.names):
        return  # a model with such heads of its own
    if reader := reader_of(hub):
        raise FetchError(
            f"{folder} holds a drafter, {reader.form}, and no model: `redraft fetch` takes its target, and "
            f"`redraft build --drafter {folder}` the drafter"
        )


def _weight_files(folder: Path) -> list[Path]:
    try:
        return weight_files(folder)
    except FileNotFoundError as error:
        if pickled := pickled_files(folder):
            return pickled
        raise FetchError(f"{error} (and no {PICKLED}): expected a model folder with its weights") from None


def _headers(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with StoredTensors.open([file]) as stored:
            return stored.shapes()
    return {name: tensor.to("meta") for name, tensor in load_pickled(file, mmap=True).items()}
