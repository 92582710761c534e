"""Hugging Face folders: safetensors, or PyTorch files that are read as tensors only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.compiler.checkpoints.source import FetchError, load_tokenizer
from redraft.compiler.checkpoints.wrapped import read_config
from redraft.model_defs.drafters.hub.folder import HubFolder
from redraft.model_defs.drafters.hub.readers import reader_of
from redraft.model_defs.files import PICKLED, pickled_files, weight_files
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.model import HEAD, has_own_head, weight_names, weights_of
from redraft.model_defs.weights.checkpoint import CheckpointWeights
from redraft.model_defs.weights.names import whole_name
from redraft.model_defs.weights.quantized import quantization_of

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
        self.files: dict[str, Path] = {}
        self.config = read_config(folder)
        try:
            quantization = quantization_of(self.config)
        except ValueError as error:
            raise FetchError(f"{folder / 'config.json'}: {error}") from None
        self.remarks: list[str] = []
        files = _weight_files(folder)
        self._weights = CheckpointWeights(folder, files, quantization)
        try:
            target = TargetConfig.load(folder, self.config)
        except UnsupportedModelError:
            refuse_drafter(folder)
            raise
        wanted = weight_names(self._tied_as_stored(target))
        headers = {name: self._weights.header(name) for name in wanted}
        self._meta = {name: tensor for name, tensor in headers.items() if tensor is not None}
        if len(self._meta) < len(wanted):
            refuse_drafter(folder)
        self._remark_unread(wanted)
        if others := sorted(folder.glob("*.gguf")):
            self.remarks.append(f"{others[0]} is not read: give the file itself instead of its folder to read it")
        quantized = list(filter(self._weights.is_quantized, self._meta))
        plain = [self._weights.stored[name] for name in self._meta if name not in quantized]
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in plain}
        self.precision = quantization.title if quantization else ", ".join(sorted(dtypes))
        unpacked = [3 * 4 * self._meta[name].numel() for name in quantized]
        pickled = {file.stat().st_size for file in files if file.suffix != ".safetensors"}
        self.memory = max((*pickled, *(tensor.nbytes for tensor in plain), *unpacked), default=0)
        self.files = self._kept(files, quantized)

    def _kept(self, files: list[Path], quantized: list[str]) -> dict[str, Path]:
        """The files, if all that is quantized in them is so that a precision stores it as it is, or nearly."""
        if odd := next((name for name in quantized if not self._weights.is_served(name)), None):
            self.remarks.append(
                "operators take fp8 and integers of 2, 4 or 8 bits in groups of a multiple of 32 as they are, and "
                f"{odd} is stored otherwise: the weights are written as bfloat16"
            )
            return {}
        kept = {file.name: file for file in files if file.suffix == ".safetensors"}
        renamed = any(whole_name(name) != whole for whole, (_, name) in self._weights.places.items())
        if quantized and (renamed or len(kept) < len(files)):
            what = "tensors have other names than their layers" if renamed else "files are torch's"
            self.remarks.append(f"its {what}, so the quantized weights are written as bfloat16")
            return {}
        return kept if quantized else {}

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return self._meta

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as chunks [rows, ...] of the stored dtype, or float32 of a quantized one. The file is mapped
        while one tensor is read."""
        return self._weights.chunks(name)

    def _tied_as_stored(self, target: TargetConfig) -> TargetConfig:
        """The configuration of weights as transformers reads them: tied where embeddings and LM head are one, or one is
        missing, whatever `tie_word_embeddings` says beside two that differ."""
        (embedding,) = weights_of(target)["embedding.weight"].sources
        if target.tie_embeddings and embedding not in self._weights.stored and HEAD in self._weights.stored:
            self._weights.add_name(embedding, HEAD)
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
        return [name for name in names if self._weights.header(name) is not None]

    def _is_same(self, name: str, other: str) -> bool:
        pairs = zip_longest(self.chunks(name), self.chunks(other))
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)

    def _remark_unread(self, wanted: list[str]) -> None:
        """Say which tensors are left out. A head that equals the embeddings is read with them."""
        read = {HEAD, *(part for name in wanted for part in self._weights.parts(name))}
        unread = sorted(
            name
            for whole, (_, name) in self._weights.places.items()
            if whole not in read and not name.endswith("inv_freq")
        )
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            self.remarks.append(f"no layer reads these weights, which are left out: {', '.join(unread[:3])}{more}")

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
