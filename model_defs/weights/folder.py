"""A model folder's files of weights: safetensors, or the GGUF file that it was fetched from.

torch is imported only where they are read.
"""

from __future__ import annotations

import math
from pathlib import Path

GGUF = "model.gguf"
"""The GGUF file of a folder that was fetched from one."""
METHOD = "gguf"
"""The `quant_method` in the `config.json` of such a folder, if operators read all of the file's blocks as they are."""


def files_of(folder: Path) -> list[Path]:
    """The files with a folder's weights. Raises as `weight_files` does."""
    if (folder / GGUF).is_file():
        return [folder / GGUF]
    from redraft.model_defs.files import weight_files

    return weight_files(folder)


def count_numbers(folder: Path) -> int:
    """Numbers in a model folder's weights, of which only the headers are read. Raises FileNotFoundError, or ValueError
    for a damaged file."""
    if (folder / GGUF).is_file():
        from redraft.model_defs.weights.gguf_header import read_header

        return sum(math.prod(tensor.shape) for tensor in read_header(folder / GGUF).tensors.values())
    from redraft.model_defs.files import StoredTensors, weight_files

    with StoredTensors.open(weight_files(folder)) as stored:
        return sum(tensor.numel() for tensor in stored.shapes().values())
