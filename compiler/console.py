"""Messages of the build scripts, and the time that their steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from redraft.console.progress import duration, heartbeat

out = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Show that a step is under way, in a log every few seconds, and how long it took."""
    start = time.monotonic()
    lines = heartbeat(lambda: f"  {name}: {duration(time.monotonic() - start)} so far", out)
    with out.status(name) if out.is_terminal else lines:
        yield
    out.print(f"  {name}: {time.monotonic() - start:.1f} s")
