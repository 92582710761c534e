"""The error of a checkpoint that the target definition cannot compute."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The checkpoint needs an architecture or a feature that the target definition lacks."""

    def __init__(self, found: str):
        super().__init__(f"unsupported model: {found}")
