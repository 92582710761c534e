"""Shared memory of a service: what its supervisor takes for it, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.serving.processes import SHARED_MEMORY, reserve_shared_memory, shared_memory_prefix

SIZE = 2**16


@pytest.fixture
def regions(tmp_path) -> Iterator[Path]:
    """How the names of the regions of a service at `tmp_path` begin."""
    start = SHARED_MEMORY / shared_memory_prefix(tmp_path)
    yield start
    for region in SHARED_MEMORY.glob(f"{start.name}*"):
        region.unlink()


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


def test_regions_take_their_memory_and_other_files_do_not(tmp_path, regions):
    """Where others fill /dev/shm, whoever writes to a region without memory is killed."""
    region, other = sparse(Path(f"{regions}1")), sparse(tmp_path / "other")
    Path(f"{regions}2").symlink_to(other)
    reserve_shared_memory(tmp_path)
    assert region.stat().st_blocks * 512 == region.stat().st_size == SIZE
    assert other.stat().st_blocks == 0
