"""docs/gpu.md names what there is."""

import re
from pathlib import Path

from benchmarks.gpu.first_hour import ROWS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()


def test_every_script_is_on_the_page():
    scripts = {file.stem for file in (ROOT / "benchmarks/gpu").glob("*.py") if "def main(" in file.read_text()}
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert listed == scripts - {"pack", "unpack", "first_hour"}
    assert set(re.findall(r"benchmarks\.gpu\.(\w+)", PAGE)) - {"NAME"} <= scripts


def test_the_rows_are_those_of_the_first_half_hour():
    rows = re.findall(r"^\| (\d) \| (\d+) \| (.*?) \|", PAGE, re.MULTILINE)
    assert [(int(number), float(minutes)) for number, minutes, _ in rows] == [
        (number, row.minutes) for number, row in enumerate(ROWS)
    ]
    for (*_, question), row in zip(rows, ROWS, strict=True):
        assert question.startswith(row.question.rstrip("?"))
