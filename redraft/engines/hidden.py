"""Hidden states where the engine keeps them: arrays on the host, or torch tensors on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Hidden: TypeAlias = "np.ndarray | Tensor"
"""Floats [n, H]; slices are views."""


def take(hidden: Hidden, rows: list[int]) -> Hidden:
    """A copy of some rows."""
    if isinstance(hidden, np.ndarray):
        return hidden.take(rows, axis=0)
    from redraft.engines.cuda.transfer import upload

    return hidden.index_select(0, upload(np.array(rows, np.int64), hidden.device))


def join(parts: Sequence[Hidden]) -> Hidden:
    """Concatenate rows, all arrays or all tensors."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)  # type: ignore[arg-type]
    import torch

    return torch.cat(parts)  # type: ignore[arg-type]


def on_host(hidden: Hidden) -> np.ndarray:
    """Copy to float32 [n, H] on the host, which waits for the device."""
    return hidden if isinstance(hidden, np.ndarray) else hidden.float().cpu().numpy()
