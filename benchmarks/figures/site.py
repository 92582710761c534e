"""Tables and plots of the documentation, from docs/results/*.json.

    python -m benchmarks.figures.site                                   # into docs/generated, as `make docs` does
    python -m benchmarks.figures.site --readme docs/pictures/speedup.svg

Pages of docs/ include what this writes. README's plot is in the tree, since nobody builds README.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

from benchmarks.figures import guide_tables, paper_plots, paper_tables
from benchmarks.figures.contenders import Load

RESULTS = Path("docs/results")


def reader(results: Path) -> Load:
    """Reads JSON files of a folder by their names."""

    def load(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    return load


def write(load: Load, drafters: Path, output: Path) -> list[Path]:
    """Write NAME.md per table and NAME.png per plot into a folder. Returns the files."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    tables = {name: table(load) for name, table in paper_tables.TABLES.items()}
    tables |= {name: table(load(name)) for name, table in guide_tables.TABLES.items()}
    for name, table in tables.items():
        written.append(output / f"{name}.md")
        written[-1].write_text(table.markdown() + "\n", encoding="utf-8")
    return written + paper_plots.write(load, drafters, output)


def write_readme_plot(load: Load, path: Path) -> None:
    """Write README's plot as SVG; the same JSON gives the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "redraft", "svg.fonttype": "none"}):
        paper_plots.speedups(load).savefig(path, metadata={"Date": None})


def main(
    results: Annotated[Path, typer.Option(help="Folder of the published JSON files.")] = RESULTS,
    drafters: Annotated[Path, typer.Option(help="Folder of the shipped drafters.")] = Path("drafters"),
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("docs/generated"),
    readme: Annotated[Path | None, typer.Option(help="Write README's plot to this file instead.")] = None,
) -> None:
    """Write tables and plots for the documentation."""
    if readme:
        write_readme_plot(reader(results), readme)
    else:
        print(f"site: {len(write(reader(results), drafters, output))} files in {output}")


if __name__ == "__main__":
    typer.run(main)
