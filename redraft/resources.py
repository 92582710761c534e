"""Checks before a long command: whether the disk and the machine's memory hold what it needs."""

from __future__ import annotations

import shutil
from pathlib import Path

from redraft.progress import size


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` is, or will be made."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def require_memory(needed: int, what: str) -> None:
    """Raises ValueError where the machine, with all other programs ended, has less memory than `needed` bytes."""
    from redraft.engines.memory import most_bytes

    if needed > (most := most_bytes()):
        raise ValueError(f"{what} takes at least {size(needed)} of memory, and this machine has {size(most)}")
