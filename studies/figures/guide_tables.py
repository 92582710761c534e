"""Tables of the guides, each by the function of the command that measured it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.figures.tables import Table
from benchmarks.load import saturation
from benchmarks.load.other_clients import compare
from benchmarks.robustness import faults
from benchmarks.verify import structured
from studies.cache import prefix_reuse

TABLES: Mapping[str, Callable[[dict[str, Any]], Table]] = {
    "faults": faults.table,
    "faults_ranks": faults.table,
    "saturation": saturation.table,
    "other_clients": compare.table,
    "prefix_reuse": prefix_reuse.table,
    "prefix_reuse_other": prefix_reuse.other_table,
    "structured": structured.texts_table,
    "structured_interfaces": structured.texts_table,
    "structured_methods": structured.methods_table,
    "structured_prompts": structured.texts_table,
    "structured_speed": structured.speed_table,
}
"""By the names of their files in docs/results."""
