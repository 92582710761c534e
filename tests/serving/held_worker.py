"""The real worker, whose ranks wait at a place in their start while the file `hold` beside the socket names that place.

"start": before MPI; "connected": when all share memory that has a name still; "loading": before the engine is there.
A rank that waits says so in a file `held.RANK`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import redraft.engines
from redraft import worker
from redraft.engines import rank_process
from redraft.runtime import Runtime

FOLDER = Path(sys.argv[sys.argv.index("--socket") + 1]).parent
RANK = os.environ[rank_process.RANK_VARIABLE]


def hold(place: str) -> None:
    """Wait here while that is wanted."""
    wanted = FOLDER / "hold"
    if wanted.exists() and wanted.read_text() == place:
        (FOLDER / f"held.{RANK}").write_text(f"{place} {os.getpid()}")
        while wanted.read_text() == place:
            time.sleep(0.02)


def held_at(place: str, act):
    """`act`, with a wait before it."""

    def wrapped(*arguments, **options):
        hold(place)
        return act(*arguments, **options)

    return wrapped


if __name__ == "__main__":
    Runtime.load = held_at("start", Runtime.load)  # type: ignore[method-assign]
    rank_process.unlink_shared_memory = held_at("connected", rank_process.unlink_shared_memory)
    redraft.engines._load = held_at("loading", redraft.engines._load)
    sys.exit(worker.main())
