"""The target's features, which drafters read: today its states after the final norm.

They stay where an engine keeps them: arrays on the host, or torch tensors on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Features: TypeAlias = "np.ndarray | Tensor"
"""Floats [n, F]; slices are views."""


def take_rows(features: Features, rows: list[int]) -> Features:
    """A copy of some rows."""
    if isinstance(features, np.ndarray):
        return features.take(rows, axis=0)
    from redraft.engines.cuda.transfer import upload

    return features.index_select(0, upload(np.array(rows, np.int64), features.device))


def join(parts: Sequence[Features]) -> Features:
    """Rows of one kind, back to back."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)  # type: ignore[arg-type]
    import torch

    return torch.cat(parts)  # type: ignore[arg-type]


def on_host(features: Features) -> np.ndarray:
    """float32 [n, F]. This waits for a device."""
    return features if isinstance(features, np.ndarray) else features.float().cpu().numpy()
