"""Would catch AVX-512's or AVX-VNNI's code giving other bits than AVX2's, reads and writes beyond arrays, and a
reference that misses a bug."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from redraft.plugins.library import PLUGINS
from tests.plugins.block_kernels import FOLDER, SANITIZERS, compiled, differing, differing_when_sanitized

pytestmark = pytest.mark.slow
LINEAR = "operators/linear"
BUGS = [
    (f"{LINEAR}/blocks.h", "BITS == 5 ? 4", "BITS == 5 ? 8"),
    (f"{LINEAR}/blocks.h", "BITS == 6 ? 2", "BITS == 6 ? 4"),
    (f"{LINEAR}/blocks.h", "left = panel.span_groups", "left = 1"),
    (f"{LINEAR}/blocks.h", "if (form == INDEX) return group_floats", "if (form >= INDEX) return group_floats"),
    (f"{LINEAR}/blocks.h", "set1(rows[r][kHalfSums + 1])", "set1(rows[r][kHalfSums])"),
    (f"{LINEAR}/blocks.h", "sums[r] = fma(set1(rows[r][kGroupScale]), value, sums[r])",
     "sums[r] = add(mul(set1(rows[r][kGroupScale]), value), sums[r])"),
    (f"{LINEAR}/blocks.h", "first + i < features", "i < kBlockGroup"),
    (f"{LINEAR}/panels.h", "to[kHalfSums] + to[kHalfSums + 1]", "to[kHalfSums]"),
    ("operators/embedding/kernel.h", "first += half_panels(segment->rows)", "first += 0"),
]  # fmt: skip


@pytest.mark.skipif(not Path("/usr/include/simde").is_dir(), reason="needs Debian's libsimde-dev")
@pytest.mark.parametrize("flags", [[], ["-DREDRAFT_EMULATED_VNNI"], ["-DREDRAFT_EMULATED_AVX_VNNI"]])
def test_others_than_avx2_have_the_stated_bits(tmp_path, flags):
    """On a CPU without: SIMDe carries its instructions out."""
    assert differing(str(compiled(tmp_path, f"-I{FOLDER}", *flags))) == []


def test_nothing_is_read_or_written_beyond_the_arrays(tmp_path):
    done = differing_when_sanitized(compiled(tmp_path, *SANITIZERS))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-3000:]


@pytest.mark.parametrize(("name", "old", "new"), BUGS)
def test_a_planted_bug_is_found(tmp_path, name, old, new):
    plugins = shutil.copytree(PLUGINS, tmp_path / "plugins", ignore=shutil.ignore_patterns("compiled", "__pycache__"))
    source = plugins / name
    assert source.read_text().count(old) == 1
    source.write_text(source.read_text().replace(old, new))
    # A read beyond an array may give what is right.
    done = differing_when_sanitized(compiled(tmp_path, *SANITIZERS, plugins=plugins))
    assert done.returncode or done.stdout != "[]\n"
