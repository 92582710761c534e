"""Reading the files of models and drafters, with messages that name the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, or ValueError for anything else."""
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return value


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises FileNotFoundError, or ValueError for a truncated or corrupted one."""
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def count_numbers(file: Path) -> int:
    """In a safetensors file, of which only the header is read. Raises as `read_tensors` does."""
    with _opened(file) as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or corrupted ({error})") from None
