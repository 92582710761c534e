"""How often the target uses each token (Lyanna, section 6.1 and figure 7): what a hot vocabulary of K rows covers.

    redraft count --model MODEL --data TEACHER_DATA --output COUNTS
    python -m studies.training.token_frequency COUNTS/token_counts.npy

The K most frequent tokens are chosen on one half of the answers and judged on the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table

ROWS = (1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)


def coverage(chosen_on: np.ndarray, judged_on: np.ndarray) -> np.ndarray:
    """Share [V] of the tokens counted in `judged_on` int64 [V] that the K most frequent of `chosen_on` int64 [V] are,
    at place K - 1."""
    ranked = judged_on[np.argsort(-chosen_on, kind="stable")]
    return ranked.cumsum() / ranked.sum()


def main(
    counts: Annotated[Path, typer.Argument(exists=True, help="token_counts.npy of redraft count.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("artifacts/reports/token_frequency.json"),
) -> None:
    """Print the table and write JSON."""
    halves = np.load(counts)
    if halves.ndim != 2 or len(halves) != 2:
        raise typer.BadParameter(f"{counts} holds an array of shape {halves.shape}, expected [2, V]")
    whole, covered = halves.sum(axis=0), coverage(*halves)
    rows = [count for count in ROWS if count <= len(whole)]
    tokens, used = int(whole.sum()), int((whole > 0).sum())
    title = f"{tokens:,} tokens; {used:,} of {len(whole):,} are used"
    table = Table(title, ["K", *(f"{count:,}" for count in rows)], [["", *(f"{covered[k - 1]:.2%}" for k in rows)]])
    console = Console()
    table.show(console)
    shares = {str(count): float(covered[count - 1]) for count in rows}
    save_report(output, {"tokens": tokens, "vocabulary": len(whole), "used": used, "covered": shares})
    console.print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
