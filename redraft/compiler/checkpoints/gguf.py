"""GGUF files of llama.cpp: the configuration, and the tokenizer that transformers rebuilds of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from redraft.bundle.generation import GENERATION_CONFIG
from redraft.compiler.checkpoints import gguf_tokenizer
from redraft.compiler.checkpoints.gguf_config import family_of_file, hf_config
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.target.bounds import shown
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.registry import SUPPORTED
from redraft.model_defs.target.model import weight_names
from redraft.model_defs.weights import gguf_header
from redraft.model_defs.weights.folder import GGUF, METHOD
from redraft.model_defs.weights.gguf import ROPE_TENSORS, GgufWeights

SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    **{"temp": "temperature", "penalty_repeat": "repetition_penalty"},
}
"""Fields of advised sampling, below `general.sampling`, and their names in `generation_config.json`."""


class GgufCheckpoint:
    """One file of a supported architecture; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, path: Path, title: str):
        """Read the header. Raises ValueError for a damaged file, or an unsupported architecture or quantization, and
        UnsupportedModelError."""
        self.path, self.title, self.files = path, title, {GGUF: path}
        fields, tensors = gguf_header.read_header(path)
        family = family_of_file(fields.get("general.architecture"), fields)
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
        shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
        shapes |= {name: _floats(tensors[name], path) for name in ROPE_TENSORS if name in tensors}
        try:
            self.config = hf_config(family, fields, shapes)
            target = TargetConfig.from_hf(self.config)
        except KeyError as missing:
            raise FetchError(f"{path}: the field or tensor {missing} is missing") from None
        except UnsupportedModelError as refusal:
            raise UnsupportedModelError(refusal.found, SUPPORTED) from None
        except ValueError as error:
            raise FetchError(f"{path}: {error}") from None
        self._weights = GgufWeights(path, tensors, target, weight_names(target))
        self._note_blocks()
        self.memory = max(tensor.nbytes for tensor in tensors.values())

    def _note_blocks(self) -> None:
        """Note in the configuration that the file's matrices are in blocks, where operators take most of their bytes as
        they are, and remark what else is quantized."""
        weights, taken, others = self._weights, 0, 0
        kinds: dict[str, str] = {}
        wider: dict[str, str] = {}
        for name in weights.shapes():
            kind = weights.quantization(name)
            if kind and (form := weights.form(name)):
                taken += weights.nbytes(name)
                if form != kind.lower():
                    wider[kind] = form.upper()
            elif kind:
                kinds.setdefault(kind, name)
                others += weights.nbytes(name)
        if taken > others:
            self.config["quantization_config"] = {"quant_method": METHOD}
        if kinds:
            which = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
            what = f"these {others / 1e6:,.0f} MB in bfloat16"
            if others >= taken:
                what = "all weights in bfloat16, or rounded anew by --precision int8 or int4"
            self.remarks.append(f"no operator takes {which} as it is: bundles store {what}")
        self.remarks += [f"bundles store {kind} as {form}, in more bytes" for kind, form in wider.items()]

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return self._weights.shapes()

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as float32 chunks [rows, ...]."""
        return self._weights.chunks(name)

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


def _floats(tensor: gguf_header.GgufTensor, path: Path) -> Tensor:
    return torch.from_numpy(gguf.dequantize(np.array(tensor.mapped(path)), tensor.type))


def _precision(fields: dict[str, Any]) -> str:
    """The quantization that the file names: Q4_K_M, BF16."""
    try:
        name = gguf.LlamaFileType(fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
