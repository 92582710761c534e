"""How it works, the papers and the developers' pages name what there is: every path exists and defines its names."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.figures.site import options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "how-it-works.md", DOCS / "papers.md", *sorted((DOCS / "developers").glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
REFERENCE = re.compile(r"`([\w.-]+/[\w./-]*)`(?:: ((?:`[\w.]+`(?:, |))+))?")
"""A path, and the names in it that follow a colon."""


def references(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The repository's paths on a page, each with its names: no code blocks, built folders, or `folder/NAME/`."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\n", " ")
    for path, names in REFERENCE.findall(text):
        built = path.startswith("artifacts/")
        if path.split("/")[0] in FOLDERS and not built and "/NAME/" not in path:
            yield path, re.findall(r"[\w.]+", names)


def defined(file: Path) -> set[str]:
    """A Python file's functions, classes and constants, what classes hold as `Class.name`; a TOML file's tables."""
    if file.suffix == ".toml":
        return set(tomllib.loads(file.read_text()))

    def within(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(within(ast.parse(file.read_text()).body, ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    missing, everything = [], set()
    for path, names in references(page):
        file = ROOT / path
        known = defined(file) if file.suffix in (".py", ".toml") and file.is_file() else set()
        everything |= known
        missing += [path] * (not file.exists()) + [f"{path}: {name}" for name in names if name not in known]
    members = set(re.findall(r"`([A-Z][a-z]\w*\.\w+)`", page.read_text()))
    assert not missing + sorted(members - everything)


def test_the_map_names_every_folder_of_code():
    named = {path.split("/")[0] for path, _ in references(ROOT / "docs" / "developers" / "index.md")}
    code = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/*.py") if path.parts[-2] != "__pycache__"}
    assert {name for name in code if not name.startswith(".")} - {"artifacts", "docs"} <= named


def test_the_flags_that_migration_names_are_ours():
    rows = [row.split("|") for row in (ROOT / "docs" / "migration.md").read_text().splitlines() if row.startswith("| ")]
    named = {flag for row in rows for flag in re.findall(r"`(?:[^`]* )?(--[a-z-]+)", row[-2])}
    ours = set(re.findall(r"--[a-z-]+", options()))
    assert len(named) > 15
    assert not named - ours
