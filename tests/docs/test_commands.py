"""Commands of README and the pages name modules, scripts and make targets that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULE = re.compile(r"python3? -m ((?:benchmarks|studies|redraft|plugins)(?:\.[a-z_0-9]+)+)")
SCRIPT = re.compile(r"\b((?:build|deploy|tests|benchmarks|studies)/[\w./-]*\w\.(?:py|toml|jsonl|yaml))\b")
TARGET = re.compile(r"(?:^|`|&& )make (?:-f (studies/Makefile) )?([a-z][a-z-]*)", re.MULTILINE)
TARGETS = {
    file: set(re.findall(r"^([a-z][a-z-]*):", (ROOT / (file or "Makefile")).read_text(), re.MULTILINE))
    for file in ("", "studies/Makefile")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_there_is(page):
    text = page.read_text()
    for module in MODULE.findall(text):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module
    for script in SCRIPT.findall(text):
        assert (ROOT / script).exists(), script
    assert [(file, target) for file, target in TARGET.findall(text) if target not in TARGETS[file]] == []
