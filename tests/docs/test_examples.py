"""Python examples of README.md and docs/, run as a reader would: a page's blocks in order, in one program.
The slow cases would catch a page whose example no longer runs.

A block whose first line names a file (`# model_defs/bigram.py`) is a part of the source, tested with its page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEFAULT, ROOT, slow_but

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# \S+\.py\b.*\n")


def program(page: Path) -> str:
    """Its runnable blocks."""
    return "\n".join(block for block in BLOCK.findall(page.read_text()) if not FILE.match(block))


PROGRAMS = {
    str(page.relative_to(ROOT)): text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (text := program(page))
}


def test_readme_shows_the_front_door():
    assert "from redraft import LLM" in PROGRAMS["README.md"]


@pytest.mark.parametrize("page", slow_but(["README.md"], PROGRAMS))
def test_examples_run(page, smollm2_bundle, tmp_path):
    """The folder has what a clone has after `make serve`, but for the precision."""
    (tmp_path / "artifacts" / "engines").mkdir(parents=True)
    (tmp_path / "artifacts" / "engines" / f"{DEFAULT}-redrafter-source").symlink_to(smollm2_bundle)
    done = subprocess.run([sys.executable, "-c", PROGRAMS[page]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
