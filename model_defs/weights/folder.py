"""A model folder's files of weights: safetensors, or the GGUF file that it was fetched from.

torch is imported only where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.model_defs.weights.checkpoint import CheckpointWeights

GGUF = "model.gguf"
"""The GGUF file of a folder that was fetched from one."""
METHOD = "gguf"
"""The `quant_method` in the `config.json` of such a folder, if operators read all of the file's blocks as they are."""


FP8_METHODS = ("fp8", "fbgemm_fp8")
"""`quant_method`s whose numbers are in FP8; those of compressed-tensors may be."""
SAMPLED = 1 << 20


def stored_precision(quantization: Mapping[str, Any]) -> str | None:
    """The `--precision` that stores the weights of a kept folder as they are, from its `quantization_config`: fp8 or
    source; None for floats."""
    method = quantization.get("quant_method")
    groups = (quantization.get("config_groups") or {}).values()
    types = {(group.get("weights") or {}).get("type") for group in groups}
    return "fp8" if method in FP8_METHODS or types == {"float"} else "source" if method else None


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file of a folder that was fetched from one. Raises ValueError where safetensors lie beside it."""
    if not (folder / GGUF).is_file():
        return None
    if other := next(folder.glob("*.safetensors"), None):
        raise ValueError(f"{folder} holds the model twice, in {GGUF} and in {other.name}: move one of them away")
    return folder / GGUF


def files_with_weights(folder: Path) -> list[Path]:
    """The files with a folder's weights. Raises as `weight_files` does, and as `gguf_file`."""
    if file := gguf_file(folder):
        return [file]
    from redraft.model_defs.files import weight_files

    return weight_files(folder)


def model_digest(folder: Path) -> str:
    """16 hexadecimal digits of a model's `config.json` and, of each file of weights, its size and SAMPLED bytes at
    either end: reading all would take minutes."""
    digest = sha256((folder / "config.json").read_bytes())
    for path in files_with_weights(folder):
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED))
            size = file.seek(0, 2)
            file.seek(max(size - SAMPLED, 0))
            digest.update(file.read() + str(size).encode())
    return digest.hexdigest()[:16]


def quantized_weights(folder: Path) -> CheckpointWeights | None:
    """The weights of a folder with quantized safetensors; None for another folder. Raises FileNotFoundError, or
    ValueError for a damaged file or a quantization that is not read."""
    if gguf_file(folder):
        return None
    from redraft.model_defs.files import read_json, weight_files
    from redraft.model_defs.weights.checkpoint import CheckpointWeights
    from redraft.model_defs.weights.quantized import quantization_of

    config = read_json(folder / "config.json")
    try:
        quantization = quantization_of(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    return CheckpointWeights(folder, weight_files(folder), quantization) if quantization else None


def count_numbers(folder: Path) -> int:
    """Numbers in a model folder's weights, of which only the headers are read. Raises FileNotFoundError, or ValueError
    for a damaged file."""
    if file := gguf_file(folder):
        from redraft.model_defs.weights.gguf_header import read_header

        return sum(math.prod(tensor.shape) for tensor in read_header(file).tensors.values())
    if quantized := quantized_weights(folder):
        return sum(tensor.numel() for tensor in quantized.shapes().values())
    from redraft.model_defs.files import StoredTensors, weight_files

    with StoredTensors.open(weight_files(folder)) as stored:
        return sum(tensor.numel() for tensor in stored.shapes().values())
