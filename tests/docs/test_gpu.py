"""Figures beside the name of a GPU: each is a number of the file and the key that its text names, or an estimate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "results" not in page.relative_to(DOCS).parts)
GPU = re.compile(r"\bH[12]00\b")
UNIT = r"(?:ms|us|µs|x|%|[GMT]B(?:/s)?|TFLOP/s|tokens/s|tokens/step|milliseconds|seconds)"
FIGURE = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?{UNIT}(?![\w/])")
SOURCE = re.compile(r"`([\w/]+\.json)`: `(\w+)`")


def blocks(text: str) -> Iterator[str]:
    """Paragraphs and tables of a page, without code; a table together with the paragraph before it."""
    before = ""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        is_table = block.lstrip().startswith("|")
        yield f"{before}\n{block}" if is_table else block
        before = "" if is_table else block


def figures(block: str) -> list[str]:
    """The numbers with units of a block and, of a table that names a GPU and has no units, of its cells."""
    found = FIGURE.findall(block)
    rows = [line for line in block.splitlines() if line.startswith("|")]
    if rows and GPU.search(rows[0]):
        found += [cell.strip() for row in rows[2:] for cell in row.strip("|").split("|")[1:] if re.search(r"\d", cell)]
    return found


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def unfounded(block: str) -> list[str]:
    """The figures of a block that no file gives."""
    found = figures(block) if GPU.search(block) and "estimate" not in block else []
    given = [
        number
        for file, key in SOURCE.findall(block)
        for number in numbers(json.loads((DOCS / "results" / file).read_text())[key])
    ]

    def is_given(figure: str) -> bool:
        plain = figure.replace(",", "")
        return any(f"{number:.{len(plain.partition('.')[2])}f}" == plain for number in given)

    return [figure for figure in found if not is_given(figure)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_figures_of_gpus_are_those_of_a_file(page):
    assert not [figure for block in blocks(page.read_text()) for figure in unfounded(block)]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("An H200 takes 5.36 ms.", ["5.36"]),
        ("An H200 takes 5.36 ms (`h200/steps.json`: `steps`).", []),
        ("An H200 takes 5.37 ms (`h200/steps.json`: `steps`).", ["5.37"]),
        ("An H100 takes 7.2 ms, by an estimate.", []),
        ("A Zen 3 takes 5.37 ms.", []),
        ("It was 1.39x on an H200 and 1,024 tokens/s.", ["1.39", "1,024"]),
        ("CUDA 13.0 on an H200 with 16 prompts.", []),
        ("Of (`h200/steps.json`: `steps`):\n\n| rows, H200 | 8 |\n|---|---|\n| 1 | 5.81 |\n| 5 | 6.12 |", ["6.12"]),
    ],
)
def test_what_counts_as_a_figure(text, wrong):
    assert [figure for block in blocks(text) for figure in unfounded(block)] == wrong


def test_some_figures_are_there():
    assert sum(len(figures(block)) for block in blocks((DOCS / "gpu.md").read_text()) if GPU.search(block)) > 9
