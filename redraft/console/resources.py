"""Checks before a long command: whether the disk and the machine's memory hold what it needs."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import psutil

from redraft.console.progress import size

CGROUPS = Path("/sys/fs/cgroup")
"""Where limits of control groups are, in containers too."""
OWN_CGROUPS = Path("/proc/self/cgroup")


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` is, or will be made."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def require_disk(folder: Path, needed: int) -> None:
    """Raises ValueError where fewer than `needed` bytes are free where `folder` is, or will be made."""
    if needed > (free := free_disk(folder)):
        raise ValueError(f"{folder}: needs {size(needed)} of disk, {size(free)} are free")


def require_memory(needed: int, what: str) -> None:
    """Raises ValueError where the machine, with all other programs ended, has less memory than `needed` bytes."""
    if needed > (most := most_bytes()):
        raise ValueError(f"{what} takes at least {size(needed)} of memory, and this machine has {size(most)}")


def host_bytes() -> int:
    """What this process has of the machine's memory and could still get, without swapping."""
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return min([available, *_cgroup_limits(), *_address_limit()])


def most_bytes() -> int:
    """What it could get if no other program had anything, swap included. Without that much it is killed, or an
    allocation fails."""
    swap = psutil.swap_memory().total
    return min([min([psutil.virtual_memory().total, *_cgroup_limits()]) + swap, *_address_limit()])


def cpu_quota() -> float | None:
    """Cores' worth of time that control groups allow this process; None where they do not limit it."""
    quotas = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, group = line.split(":", 2)
        current = CGROUPS / group.strip("/")
        files = [] if controllers else [folder / "cpu.max" for folder in (current, *current.parents)]
        for file in files:
            if file.is_relative_to(CGROUPS) and file.exists():
                quota, period = file.read_text().split()
                quotas += [] if quota == "max" else [int(quota) / int(period)]
    return min(quotas, default=None)


def _address_limit() -> list[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return [] if limit == resource.RLIM_INFINITY else [limit]


def _cgroup_limits() -> list[int]:
    """Limits of the control groups that this process is in and of those around them, of version 2 and of version 1."""
    limits = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        current = root / group.strip("/")
        files = [folder / name for folder in (current, *current.parents) if folder.is_relative_to(root)]
        texts = [file.read_text().strip() for file in files if file.exists()]
        limits += [int(text) for text in texts if text != "max"]
    return limits
