"""GGUF files of llama.cpp: dequantized a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from compiler.checkpoints.source import FetchError, load_tokenizer, row_blocks
from model_defs.target.config import TargetConfig
from model_defs.target.families.registry import SUPPORTED
from model_defs.target.model import weight_names
from model_defs.target.rope import RopeConfig

ARCHITECTURES = ("llama", "qwen2")
TURNED = ("llama",)
"""Architectures whose query and key rows llama.cpp stores in adjacent pairs instead of two halves."""
ROPE_DIVISORS = "rope_freqs.weight"


class GgufCheckpoint:
    """One file of a supported architecture; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, path: Path, title: str):
        """Read the header. Raises FetchError for a corrupt file, or an unsupported architecture or quantization."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self.path, self.title = path, title
        fields, self._tensors = _read_header(path)
        self._architecture = fields.get("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise FetchError(f"unsupported model: GGUF architecture {self._architecture!r}. Supported: {SUPPORTED}.")
        if (parts := fields.get("split.count", 1)) > 1:
            raise FetchError(f"{path} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
        self.precision = _precision(fields)
        self._refuse_unknown_quantizations()
        rope = self._rope(fields)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        config.rope_parameters = {**config.rope_parameters, **rope}
        config.tie_word_embeddings = "output.weight" not in self._tensors
        self.config = config.to_diff_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._names = self._hugging_face_names()
        self.memory = int(max(tensor.n_bytes for tensor in self._tensors.values()))

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return {
            name: torch.empty(tuple(int(size) for size in reversed(self._tensors[stored].shape)), device="meta")
            for name, stored in self._names.items()
        }

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows as float32 blocks [rows, ...]. The file is mapped while one tensor is read."""
        tensor = self._tensors[self._names[name]]
        # A mapping of its own: that of the reader would keep every page that was read.
        data = np.memmap(self.path, tensor.data.dtype, "r", tensor.data_offset, tensor.data.shape)
        if data.ndim == 1:
            yield torch.from_numpy(gguf.dequantize(np.array(data), tensor.tensor_type))
            return
        order = self._row_order(name, len(data))
        for rows in row_blocks(tuple(reversed(tensor.shape.tolist()))):
            yield torch.from_numpy(gguf.dequantize(data[order[rows]], tensor.tensor_type))

    def tokenizer(self) -> Any:
        """The tokenizer, rebuilt from the file's vocabulary and merges."""
        return load_tokenizer(self.path.parent, self.path.name)

    def copy_settings(self, folder: Path) -> None:
        """Nothing: a GGUF file has no generation settings."""

    def _row_order(self, name: str, rows: int) -> np.ndarray:
        """The stored row of each row, int64 [rows]."""
        order = np.arange(rows)
        heads = self._heads.get(name.split(".")[-2]) if self._architecture in TURNED else None
        return order if heads is None else order.reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _hugging_face_names(self) -> dict[str, str]:
        """The file's names of the target's tensors, by Hugging Face's. Raises FetchError for tensors beyond those."""
        config = TargetConfig.from_hf(self.config)
        kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        known = gguf.get_tensor_name_map(kind, config.num_layers)
        names = {name: known.get_name(name, (".weight", ".bias")) for name in weight_names(config)}
        found = {name: stored for name, stored in names.items() if stored in self._tensors}
        if unknown := sorted(self._tensors.keys() - found.values() - {ROPE_DIVISORS}):
            raise FetchError(
                f"unsupported model: {self.path} holds {len(unknown)} tensors that its architecture "
                f"{self._architecture!r} does not have, such as {unknown[0]}. Supported: {SUPPORTED}."
            )
        return found

    def _refuse_unknown_quantizations(self) -> None:
        for tensor in {tensor.tensor_type: tensor for tensor in self._tensors.values()}.values():
            try:
                gguf.dequantize(np.asarray(tensor.data[:1]), tensor.tensor_type)
            except NotImplementedError:
                found = tensor.tensor_type.name
                raise FetchError(f"{self.path}: cannot dequantize {found}; take the model as Q8_0 or Q4_K_M") from None

    def _rope(self, fields: dict[str, Any]) -> dict[str, Any]:
        """RoPE scaling as Hugging Face's `rope_parameters`; empty where there is none. Raises FetchError."""
        context = fields.get(f"{self._architecture}.context_length", 0)
        window = fields.get(f"{self._architecture}.attention.sliding_window")
        if window and window < context:
            raise FetchError(
                f"unsupported model: an active sliding window of {window} tokens in {self.path}. "
                f"Supported: {SUPPORTED}."
            )
        if ROPE_DIVISORS in self._tensors:
            divisors = torch.tensor(self._tensors[ROPE_DIVISORS].data).float()
            return _llama3_rope(divisors, float(fields.get(f"{self._architecture}.rope.freq_base", 10_000.0)))
        kind = fields.get(f"{self._architecture}.rope.scaling.type", "none")
        if kind == "none":
            return {}
        return {"rope_type": kind, "factor": float(fields.get(f"{self._architecture}.rope.scaling.factor", 1.0))}


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """The file's fields but the tokenizer's, and its tensors by name. Raises FetchError for a corrupt file."""
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise FetchError(f"{path}: not a GGUF file, or truncated ({error})") from error


def _precision(fields: dict[str, Any]) -> str:
    """The quantization that the file names: Q4_K_M, BF16."""
    try:
        name = gguf.LlamaFileType(fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _llama3_rope(divisors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling parameters from the divisors [head_size / 2] that a GGUF file stores instead of them."""
    factor = float(divisors.max())
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = 2 * divisors.numel()
    scaled = RopeConfig(theta=theta, type="llama3", factor=factor).inverse_frequencies(size)
    plain = RopeConfig(theta=theta).inverse_frequencies(size)
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise FetchError(f"unsupported model: RoPE divisors that are not Llama 3's. Supported: {SUPPORTED}.")
    return parameters
