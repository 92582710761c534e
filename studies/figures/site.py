"""What is rendered: tables and plots from docs/results/*.json, and what comes from the commands and request fields.

    python -m studies.figures.site    # as `make docs` does; a test fails where it would change something

Tables are written into the pages that show them, and plots as SVG beside them, so that a Git host shows both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from typer.cli import get_docs_for_click

from redraft.cli import COMMANDS, application
from redraft.errors import Code
from redraft.metrics import ENGINE, OPENAI, SERVICE, Metric
from studies.figures import guide_tables, paper_plots, paper_tables, request_fields
from studies.figures.contenders import Load
from studies.figures.request_fields import markdown

BLOCK = re.compile(r"(<!-- rendered: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
"""A rendered part of a page, with its name."""


def reader(results: Path) -> Load:
    """Reads JSON files of a folder by their names."""

    def load(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    return load


def render(load: Load) -> dict[str, str]:
    """Each table as Markdown, by the names that pages use."""
    tables = {name: table(load) for name, table in paper_tables.TABLES.items()}
    tables |= {name: table(load(name)) for name, table in guide_tables.TABLES.items()}
    rendered = {name: table.markdown() for name, table in tables.items()}
    return product_tables() | request_fields.tables() | rendered


def product_tables() -> dict[str, str]:
    """The tables of commands, error codes and metrics as Markdown."""
    command_rows = [(command.group, f"`{name}`", command.summary()) for name, command in COMMANDS.items()]
    code_rows = [(f"`{code}`", _status(code), code.grpc, code.meaning) for code in Code]
    metrics = {"engine_metrics": ENGINE, "service_metrics": SERVICE, "v1_metrics": OPENAI}
    return {
        "cli": markdown(["group", "command", "what it does"], command_rows),
        "codes": markdown(["code", "HTTP", "gRPC", "when"], code_rows),
    } | {name: markdown(["name", "kind", "meaning"], map(_metric, entries)) for name, entries in metrics.items()}


def _status(code: Code) -> str:
    return f"{code.http}, Retry-After {code.retry_after_s}" if code.retry_after_s else str(code.http)


def _metric(metric: Metric) -> tuple[str, ...]:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"`{metric.series}{labels}`", metric.kind.__name__.lower(), metric.help


USAGE = re.compile(r"\*\*Usage\*\*:\n\n```console\n.*?```\n\n", re.DOTALL)
REPEATED = re.compile(
    r"^\*\*(?:Options|Arguments)\*\*:\n\n|^\* `--help`.*\n|\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", re.MULTILINE
)
"""What the program's own help needs and a page does not: the page's headings are its list of commands."""


def options() -> str:
    """Every option of the commands, whose headings follow the page's own. Only the built
    site has them (`docs/conf.py`): in the sources they would repeat `--help`."""
    command = typer.main.get_command(application(*COMMANDS))
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="redraft")
    text = text[text.index("\n## ") :]
    text = REPEATED.sub("", USAGE.sub("", text)).replace(" range>", ">")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def fill(page: str, rendered: Mapping[str, str]) -> str:
    """The page with its rendered parts replaced. Blank lines end a table before the comment."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{rendered[block[2]]}\n\n{block[3]}", page)


def write_plots(load: Load, drafters: Path, folder: Path) -> list[Path]:
    """Write NAME.svg per plot into a folder; the same JSON gives the same bytes. Returns the files."""
    # Every text names its fonts. Verdana is as wide as matplotlib's own, which not every reader has.
    fonts = ["DejaVu Sans", "Verdana"]
    with mpl.rc_context({"svg.hashsalt": "redraft", "svg.fonttype": "none", "font.sans-serif": fonts}):
        return paper_plots.write(load, drafters, folder)


def main(
    drafters: Annotated[Path, typer.Option(help="Folder of the shipped drafters.")] = Path("drafters"),
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs"),
) -> None:
    """Write tables and references into the pages, plots into docs/pictures, and the files that the table of request
    fields gives."""
    load = reader(docs / "results")
    rendered = render(load)
    for path in sorted(docs.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        path.write_text(fill(page, rendered), encoding="utf-8")
    write_plots(load, drafters, docs / "pictures")
    for path, text in request_fields.files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
