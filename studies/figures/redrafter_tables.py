"""ReDrafter's tables beside ours. Numbers of the paper stand here, each with its source; ours are read."""

from __future__ import annotations

from redraft.loadtest.tables import Table
from studies.figures.contenders import (
    Load,
    accepted,
    contenders,
    served,
    speedup,
)

TABLE_2 = {0.1: 2.09, 0.5: 2.11, 1: 1.57}
"""ReDrafter, table 2: speed-up of Vicuna 7B by requests per second."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def table2(load: Load) -> Table:
    """ReDrafter's beams through Triton at fixed request rates."""
    return served(load("redrafter_table2"), TABLE_2)


def table4(load: Load) -> Table:
    """Live beams of length 4 by width, as in the paper's table of Apple's hardware."""
    table = Table("Beams of length 4", ["beam width", "speed-up", "tokens/step", "rows per step"])
    result = contenders(load("zen4/beam_shapes_live"), "0")
    for width in range(1, 5):
        entry = result[f"w{width}l4"]
        table.rows.append([str(width), speedup(entry), accepted(entry), f"{entry['rows_per_step']:.1f}"])
    return table
