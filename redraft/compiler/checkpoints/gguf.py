"""GGUF files of llama.cpp: dequantized a block of rows at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from redraft.bundle.generation import GENERATION_CONFIG
from redraft.compiler.checkpoints import gguf_header, gguf_tokenizer
from redraft.compiler.checkpoints.gguf_config import ROPE_TENSORS, TOKENIZER_FIELDS, family_of_file, hf_config
from redraft.compiler.checkpoints.gguf_tokenizer import NAMED_TEMPLATE
from redraft.compiler.checkpoints.source import FetchError, row_blocks
from redraft.model_defs.files import unreadable
from redraft.model_defs.target.bounds import shown
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.registry import SUPPORTED
from redraft.model_defs.target.model import weight_names

EXPERT = re.compile(r"(model\.layers\.\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    **{"temp": "temperature", "penalty_repeat": "repetition_penalty"},
}
"""Fields of advised sampling, below `general.sampling`, and their names in `generation_config.json`."""


class Stored(NamedTuple):
    """Where a file has one of Hugging Face's weights."""

    tensor: str
    expert: int | None = None
    """Its number in the first dimension, where the file stacks experts"""


class GgufCheckpoint:
    """One file of a supported architecture; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, path: Path, title: str):
        """Read the header. Raises FetchError for a corrupt file, or an unsupported architecture or quantization, and
        UnsupportedModelError."""
        self.path, self.title = path, title
        fields, self._tensors = _read_header(path)
        family = family_of_file(fields.get("general.architecture"), fields)
        assert family.gguf
        self._family = family.gguf
        if (parts := fields.get("split.count", 1)) not in (0, 1):
            raise FetchError(
                f"{path} is one of {shown(parts)} parts: join them with llama.cpp's llama-gguf-split --merge"
            )
        if (kind := fields.get("general.type", "model")) != "model":
            raise FetchError(f"{path} holds {shown(kind)}, as its general.type says, expected 'model'")
        gguf_tokenizer.check(path, fields)
        self._fields = fields
        self.precision = _precision(fields)
        self.remarks: list[str] = []
        self._refuse_unknown_quantizations()
        tensors = {name: torch.empty(_shape(tensor), device="meta") for name, tensor in self._tensors.items()}
        tensors |= {name: torch.tensor(self._tensors[name].data).float() for name in ROPE_TENSORS if name in tensors}
        try:
            self.config = hf_config(family, fields, tensors)
            target = TargetConfig.from_hf(self.config)
        except KeyError as missing:
            raise FetchError(f"{path}: the field or tensor {missing} is missing") from None
        except UnsupportedModelError as refusal:
            raise UnsupportedModelError(refusal.found, SUPPORTED) from None
        except ValueError as error:
            raise FetchError(f"{path}: {error}") from None
        self._heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        self._names = self._hugging_face_names(target)
        self.memory = int(max(tensor.n_bytes for tensor in self._tensors.values()))

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        shapes = {}
        for name, stored in self._names.items():
            shape = _shape(self._tensors[stored.tensor])
            shapes[name] = torch.empty(shape if stored.expert is None else shape[1:], device="meta")
        return shapes

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as float32 blocks [rows, ...]. The file is mapped while one tensor is read."""
        stored = self._names[name]
        tensor = self._tensors[stored.tensor]
        # A mapping of its own: that of the reader would keep every page that was read.
        data = np.memmap(self.path, tensor.data.dtype, "r", tensor.data_offset, tensor.data.shape)
        shape = _shape(tensor)
        if stored.expert is not None:
            data, shape = data[stored.expert], shape[1:]
        if data.ndim == 1:
            values = torch.from_numpy(gguf.dequantize(np.array(data), tensor.tensor_type))
            yield values - self._family.norm_offset if name.endswith("norm.weight") else values
            return
        order = self._row_order(name, len(data))
        for rows in row_blocks(shape):
            yield torch.from_numpy(gguf.dequantize(data[order[rows]], tensor.tensor_type))

    def tokenizer(self) -> Any:
        """The tokenizer, rebuilt from the file's vocabulary and merges. Raises FetchError."""
        return gguf_tokenizer.load(self.path, self._fields)

    def copy_settings(self, folder: Path) -> None:
        """Write the sampling that the file advises as `generation_config.json`, if it advises one."""
        # As text a float32 is the decimal that was written: 0.7, not 0.699999988.
        advised = {
            name: float(str(np.float32(value))) if isinstance(value, float) else value
            for field, name in SAMPLING.items()
            if (value := self._fields.get(f"general.sampling.{field}")) is not None
        }
        if advised:
            (folder / GENERATION_CONFIG).write_text(json.dumps(advised, indent=2) + "\n")

    def _row_order(self, name: str, rows: int) -> np.ndarray:
        """The stored row of each row, int64 [rows]."""
        order = np.arange(rows)
        heads = self._heads.get(name.split(".")[-2]) if self._family.turned else None
        return order if heads is None else order.reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _hugging_face_names(self, config: TargetConfig) -> dict[str, Stored]:
        """The file's places of the target's tensors, by Hugging Face's names. Raises FetchError for other tensors."""
        architecture = self._family.architecture
        kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        name_map = gguf.get_tensor_name_map(kind, config.num_layers)

        def place(name: str) -> Stored:
            if expert := EXPERT.fullmatch(name):
                layer, number, part = expert.groups()
                block = name_map.get_name(f"{layer}.mlp.experts.{EXPERT_PARTS[part]}_proj.weight", (".weight",))
                return Stored(block or name, int(number))
            return Stored(name_map.get_name(name, (".weight", ".bias")) or name)

        names = {name: place(name) for name in weight_names(config)}
        result = {name: stored for name, stored in names.items() if stored.tensor in self._tensors}
        used = {stored.tensor for stored in result.values()}
        if unknown := sorted(self._tensors.keys() - used - set(ROPE_TENSORS)):
            raise FetchError(
                f"unsupported model: {self.path} holds {len(unknown)} tensors that its architecture "
                f"{architecture!r} does not have, such as {unknown[0]}. Supported: {SUPPORTED}."
            )
        return result

    def _refuse_unknown_quantizations(self) -> None:
        for tensor in {tensor.tensor_type: tensor for tensor in self._tensors.values()}.values():
            try:
                gguf.dequantize(np.asarray(tensor.data[:1]), tensor.tensor_type)
            except NotImplementedError:
                type_name = tensor.tensor_type.name
                raise FetchError(
                    f"{self.path}: cannot dequantize {type_name}; take the model as Q8_0 or Q4_K_M"
                ) from None


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """The file's fields, of the tokenizer's only those of TOKENIZER_FIELDS, and its tensors by name. Raises FetchError
    for a corrupt file."""
    try:
        gguf_header.check(path)
        reader = gguf.GGUFReader(path)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name in TOKENIZER_FIELDS or not name.startswith("tokenizer.") or name.startswith(NAMED_TEMPLATE)
        }
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise FetchError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    """Why a file could not be read as far as its header says."""
    magic = gguf_header.MAGIC
    with path.open("rb") as file:
        if file.read(len(magic)) != magic:
            return unreadable(path, f"{path} is not a GGUF file: it does not begin with {magic.decode()}")
    return (
        f"{path} is cut or damaged, or of an unknown version: its {path.stat().st_size} bytes do not hold what its "
        f"header says ({error}); fetch the file again"
    )


def _precision(fields: dict[str, Any]) -> str:
    """The quantization that the file names: Q4_K_M, BF16."""
    try:
        name = gguf.LlamaFileType(fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
