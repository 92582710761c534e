"""The weights of a GGUF file of llama.cpp, by Hugging Face's names: dequantized, or in their blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from redraft.model_defs.files import row_chunks
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.families.registry import FAMILIES, SUPPORTED
from redraft.model_defs.weights import gguf_header
from redraft.model_defs.weights.gguf_header import GgufTensor
from redraft.plugins.operators.linear.blocks import GGUF_FORMS, BlockWeight

EXPERT = re.compile(r"(model\.layers\.\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
LLAMA3_DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (LLAMA3_DIVISORS, LONG, SHORT)
"""Tensors that belong to the configuration"""


FLOATS = ("F32", "F16", "BF16")
"""Types of tensors that are not quantized"""


class Place(NamedTuple):
    """Where a file has one of Hugging Face's weights."""

    tensor: str
    expert: int | None = None
    """Its number in the first dimension, where the file stacks experts"""


class GgufWeights:
    """The weights of one file. It is mapped while one tensor is read, and for no longer."""

    def __init__(self, path: Path, tensors: Mapping[str, GgufTensor], config: TargetConfig, names: Iterable[str]):
        """`tensors` are those of the file's header, `names` Hugging Face's of all of the target's weights. Raises
        ValueError for tensors that the target has no place for or that cannot be dequantized."""
        self.path, family = path, FAMILIES[config.family]
        if not family.gguf:
            raise ValueError(f"{path}: GGUF files of {family.title} are not read")
        self._family = family.gguf
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self.tensors = tensors
        self._refuse_unknown_types()
        self._names = self._places(names, config.num_layers)

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name. Matrices are bfloat16 there, in which they are kept where floats of their
        own size are asked for."""
        shapes = {}
        for name, place in self._names.items():
            shape = self.tensors[place.tensor].shape[place.expert is not None :]
            dtype = torch.bfloat16 if len(shape) > 1 else torch.float32
            shapes[name] = torch.empty(shape, dtype=dtype, device="meta")
        return shapes

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows in order, as float32 chunks [rows, ...]."""
        tensor, raw = self._raw(name)
        if raw.ndim == 1:
            values = _dequantized(raw[None], tensor.type)[0]
            yield values - self._family.norm_offset if name.endswith("norm.weight") else values
            return
        order = self._row_order(name, len(raw))
        for rows in row_chunks((len(raw), tensor.shape[-1])):
            yield _dequantized(raw[order[rows]], tensor.type)

    def read(self, name: str) -> Tensor:
        """A tensor, float32."""
        place, begin = self._names[name], 0
        result = torch.empty(self.tensors[place.tensor].shape[place.expert is not None :])
        for chunk in self.chunks(name):
            result[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return result

    def form(self, name: str) -> str | None:
        """The form of a matrix that is stored in blocks; None for floats, and for blocks that no operator reads."""
        place = self._names[name]
        tensor = self.tensors[place.tensor]
        kind, dimensions = tensor.type.name.lower(), len(tensor.shape) - (place.expert is not None)
        return GGUF_FORMS.get(kind) if dimensions == 2 else None

    def quantization(self, name: str) -> str | None:
        """The type of a tensor that is no float's."""
        kind = self.tensors[self._names[name].tensor].type.name
        return None if kind in FLOATS else kind

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        place = self._names[name]
        tensor = self.tensors[place.tensor]
        return tensor.nbytes // (1 if place.expert is None else tensor.shape[0])

    def feature_order(self, name: str) -> None:
        """Features always lie in order."""

    def in_blocks(self, name: str, rows: np.ndarray) -> BlockWeight:
        """These rows of a matrix that has a form. Raises ValueError for scales that are not finite."""
        tensor, raw = self._raw(name)
        weight = BlockWeight.from_gguf(tensor.type.name, raw[self._row_order(name, len(raw))[rows]])
        if not all(np.isfinite(part).all() for part in weight.parts.values()):
            raise ValueError(f"{self.path}: {name} holds NaN or infinity: the file is damaged")
        return weight

    def _raw(self, name: str) -> tuple[GgufTensor, np.ndarray]:
        """Where a weight is, and its bytes uint8 [rows, bytes of a row], or those of its only row."""
        place = self._names[name]
        tensor = self.tensors[place.tensor]
        raw = tensor.mapped(self.path)
        return tensor, raw if place.expert is None else raw[place.expert]

    def _row_order(self, name: str, rows: int) -> np.ndarray:
        """The stored row of each row, int64 [rows]."""
        order = np.arange(rows)
        heads = self._heads.get(name.split(".")[-2]) if self._family.turned else None
        return order if heads is None else order.reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _places(self, names: Iterable[str], num_layers: int) -> dict[str, Place]:
        """The file's places of the target's tensors, by Hugging Face's names. Raises ValueError for other tensors."""
        architecture = self._family.architecture
        kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        name_map = gguf.get_tensor_name_map(kind, num_layers)

        def place(name: str) -> Place:
            if expert := EXPERT.fullmatch(name):
                layer, number, part = expert.groups()
                block = name_map.get_name(f"{layer}.mlp.experts.{EXPERT_PARTS[part]}_proj.weight", (".weight",))
                return Place(block or name, int(number))
            return Place(name_map.get_name(name, (".weight", ".bias")) or name)

        places = {name: place(name) for name in names}
        result = {name: each for name, each in places.items() if each.tensor in self.tensors}
        used = {each.tensor for each in result.values()}
        if unknown := sorted(self.tensors.keys() - used - set(ROPE_TENSORS)):
            raise ValueError(
                f"unsupported model: {self.path} holds {len(unknown)} tensors that its architecture "
                f"{architecture!r} does not have, such as {unknown[0]}. Supported: {SUPPORTED}."
            )
        return result

    def _refuse_unknown_types(self) -> None:
        """Raise ValueError for a tensor of a type that is not read."""
        for name, tensor in {tensor.type: (name, tensor) for name, tensor in self.tensors.items()}.values():
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
            except NotImplementedError:
                raise gguf_header.unread(self.path, name, tensor.type.name) from None


def _dequantized(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Rows uint8 [N, bytes] of a type as float32 [N, K]. Where we have a form of our own it takes half the time."""
    if kind.name.lower() in GGUF_FORMS:
        return torch.from_numpy(BlockWeight.from_gguf(kind.name, raw).dequantized())
    return torch.from_numpy(gguf.dequantize(np.array(raw), kind))
