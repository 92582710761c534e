"""Tables of the guides, each by the function of the command that measured it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.verify import structured
from redraft.loadtest import saturation
from redraft.loadtest.tables import Table
from studies.cache import prefix_reuse

TABLES: Mapping[str, Callable[[dict[str, Any]], Table]] = {
    "saturation": saturation.table,
    "prefix_reuse": prefix_reuse.table,
    "structured": structured.texts_table,
    "structured_speed": structured.speed_table,
}
"""By the names of their files in docs/results."""
