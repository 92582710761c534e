"""docs/gpu.md names what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_needs_a_gpu_is_in_the_command():
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", file.read_text())
    }
    (named,) = re.findall(r"^python -m pytest -m gpu (.*?)```", (ROOT / "docs/gpu.md").read_text(), re.DOTALL | re.M)
    assert set(re.findall(r"\S+\.py", named)) == marked
