"""What pages show of docs/results and of the command line is what these give, and needs no build to be read."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from redraft.loadtest.results import as_json
from studies.figures import request_fields
from studies.figures.site import BLOCK, fill, reader, render, write_plots

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
AGAIN = "write it anew: python -m studies.figures.site"


LOADED: set[str] = set()
"""The result files that tables and plots were made of, by name."""


def load(name: str) -> Any:
    """Read a result file, and note that it is shown."""
    LOADED.add(name)
    return reader(DOCS / "results")(name)


@pytest.fixture(scope="module")
def rendered():
    return render(load)


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    return write_plots(load, ROOT / "drafters", tmp_path_factory.mktemp("plots"))


def test_pages_show_what_the_results_give(rendered):
    assert [name for name, page in PAGES.items() if fill(page, rendered) != page] == [], AGAIN


def test_files_of_the_product_are_what_the_table_of_request_fields_gives():
    assert [path.name for path, text in request_fields.files().items() if path.read_text() != text] == [], AGAIN


def test_everything_rendered_is_shown_once(rendered):
    shown = [name for page in PAGES.values() for _, name, _ in BLOCK.findall(page)]
    assert sorted(shown) == sorted(rendered)


def test_plots_are_drawn_from_the_results(plots):
    assert len(plots) > 10
    others = [plot.name for plot in plots if plot.read_bytes() != (DOCS / "pictures" / plot.name).read_bytes()]
    assert others == [], AGAIN


def test_the_first_page_says_what_it_is_shows_it_and_has_three_ways_in():
    """It was a list of links."""
    first, _, ways = PAGES["index.md"].partition("## Three ways in\n")
    assert "speculative decoding" in first
    (picture,) = re.findall(r"^!\[.+\]\((.+)\)$", first, re.MULTILINE)
    assert (DOCS / picture).is_file()
    blocks = re.split(r"^### .*$", ways.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(blocks) == 3
    assert all("```" in block and "](" in block for block in blocks)


@pytest.mark.parametrize("file", sorted((DOCS / "results").rglob("*.json")), ids=lambda file: file.stem)
def test_a_result_file_is_compact(file):
    assert file.read_text() == as_json(json.loads(file.read_text())) + "\n", "as redraft.loadtest.results writes it"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_pictures_on_a_git_host(page):
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGES[page])
    assert not [picture for picture in pictures if not (DOCS / page).parent.joinpath(picture).exists()]


def test_the_first_page_names_every_page():
    links = re.findall(r"\]\(([^)#]+\.md)\)", PAGES["index.md"])
    developers = {page for page in PAGES if page.startswith("developers/")}  # which their own index names
    assert set(PAGES) - set(links) - developers <= {"index.md"}


@pytest.mark.parametrize("file", sorted((DOCS / "results").rglob("*.json")), ids=lambda file: file.stem)
def test_a_file_says_where_its_figures_come_from(file):
    content = json.loads(file.read_text())
    origin = {key: content.get(key) for key in ("machine", "date", "command")}
    assert all(origin.values()), origin
    assert date.fromisoformat(origin["date"]) <= date.today()
    assert not any(str(value).startswith("not recorded") for value in origin.values())


def test_every_file_is_shown_or_linked(rendered, plots):
    """A table, a plot or a sentence that links to it."""
    assert rendered
    assert plots
    pages = "\n".join(PAGES.values())
    files = {
        file.relative_to(DOCS / "results").with_suffix("").as_posix() for file in (DOCS / "results").rglob("*.json")
    }
    assert {name for name in files - LOADED if f"{Path(name).name}.json" not in pages} == set()
