"""One HTML page with tables and plots from the JSON files of the benchmarks.

    python -m benchmarks.load.report --load artifacts/loadtest/ar artifacts/loadtest/spec

The first load test is the baseline. Results of the other benchmarks are included where they exist.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import plots
from benchmarks.command import run
from benchmarks.load import comparison
from benchmarks.speed import single_stream
from benchmarks.verify import lossless as verify_lossless
from redraft.loadtest.plots import load_test, new_figure
from redraft.loadtest.results import load_runs
from redraft.loadtest.tables import COMPARED, Table, run_tables, speedup_table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #111827; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } img { max-width: 100%; }
table { border-collapse: collapse; margin: 1rem 0 1.5rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #4b5563; padding-bottom: .3rem; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
"""


@dataclass
class Section:
    """A heading with plots and tables."""

    title: str
    plots: list[Path] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def html(self) -> str:
        """The section, its pictures inside."""
        images = [f'<img alt="{escape(path.stem)}" src="{_data_url(path)}">' for path in self.plots]
        return "\n".join([f"<h2>{escape(self.title)}</h2>", *images, *map(_table_html, self.tables)])


def _table_html(table: Table) -> str:
    """A table as HTML, title included."""
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows]
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f"<table>\n<caption>{escape(table.title)}</caption>\n<tr>{head}</tr>\n{body}</table>"


def _data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def load_section(folders: list[Path], plot_folder: Path) -> Section:
    """Load tests: the first folder is the baseline of the others."""
    labels = [load_runs(folder) for folder in folders]
    tables = [speedup_table(labels[0], labels[1:], name) for name in COMPARED] if len(labels) > 1 else []
    tables += [table for runs in labels for table in run_tables(runs, ["ttft", "tpot"])]
    return Section("Load test", [load_test(labels, plot_folder)], tables)


def single_section(content: dict[str, Any], plot_folder: Path) -> Section:
    """Single-stream speeds, acceptance per depth, and several streams at once."""
    figure, (speed, depth, streams) = new_figure(3)
    singles, levels = content["single"], content["concurrent"]
    names = list(dict.fromkeys(name for single in singles.values() for name in single["contenders"]))
    groups = [f"temperature {temperature}" for temperature in singles]
    speeds = {
        name: [single["contenders"].get(name, {}).get("tokens_per_s", math.nan) for single in singles.values()]
        for name in names
    }
    plots.grouped_bars(speed, groups, speeds, "tokens/s", "One stream")
    speed.legend(frameon=False, fontsize=8, loc="upper center", ncols=len(speeds))
    conditional = {
        f"{name}, temperature {temperature}": entry["conditional_acceptance"]
        for temperature, single in singles.items()
        for name, entry in single_stream.speculative_entries(single).items()
    }
    plots.lines(depth, conditional, ("Conditional acceptance rate", "depth in the tree", "share accepted"))
    ratios = {
        f"{name}, temperature {temperature}": {
            str(level["streams"]): level["contenders"][name]["speedup"] for level in rows
        }
        for temperature, rows in levels.items()
        if rows
        for name in rows[0]["contenders"]
        if name != comparison.AR
    }
    plots.lines(streams, ratios, ("Speed-up by streams at once", "streams", "times auto-regressive"))
    streams.axhline(1, color="#9ca3af", linestyle=":", linewidth=1)
    title = f"Without a server, against {content['auto_regressive']}"
    return Section(title, [plots.save(figure, plot_folder / "single_stream.png")], single_stream.tables(content))


def lossless_section(content: dict[str, Any], plot_folder: Path) -> Section:
    """The lossless check."""
    return Section("Speculation changes nothing", [], verify_lossless.tables(content))


SECTIONS: dict[str, Callable[[dict[str, Any], Path], Section]] = {
    "single_stream": single_section,
    "lossless": lossless_section,
}


def page(title: str, sections: list[Section]) -> str:
    """The whole HTML document; it needs no other file."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    body = "\n".join(section.html() for section in sections)
    heading = f"<h1>{escape(title)}</h1>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{heading}\n{body}\n</body></html>\n"


def main(
    load: Annotated[
        list[Path], typer.Option(help="Result folders of load tests, the baseline first; default: none.")
    ] = [],
    results: Annotated[Path, typer.Option(help="Folder with the other benchmarks' JSON files.")] = Path(
        "artifacts/reports"
    ),
    title: Annotated[
        str, typer.Option(help="Heading of the page.")
    ] = "redraft: speculative against auto-regressive decoding",
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("artifacts/reports/report.html"),
) -> None:
    plot_folder = output.parent / "plots"
    try:
        sections = [load_section(load, plot_folder)] if load else []
        for name, section in SECTIONS.items():
            path = results / f"{name}.json"
            if path.is_file():
                sections.append(section(json.loads(path.read_text(encoding="utf-8")), plot_folder))
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    if not sections:
        raise typer.BadParameter(f"no --load folders and no results in {results}: run a benchmark first")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(title, sections), encoding="utf-8")
    print(f"report: {output}")


if __name__ == "__main__":
    run(main)
