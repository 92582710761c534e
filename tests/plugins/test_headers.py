import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from redraft.plugins import headers, kernels

PLANTED = "    int64_t planted;\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the headers, with a field planted before the weight of EmbeddingArgs."""
    for name in ("cpu", "operators"):
        shutil.copytree(headers.PLUGINS / name, tmp_path / name, ignore=lambda _, names: {"__pycache__"} & {*names})
    header = tmp_path / "cpu" / "kernels.h"
    before, after = header.read_text().split("struct EmbeddingArgs {\n")
    header.write_text(f"{before}struct EmbeddingArgs {{\n{PLANTED}{after}")
    return tmp_path


def test_a_library_of_another_header_is_refused(copy):
    path = copy / "libplanted.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "cpu/layout.cpp", "-o", str(path)]
    subprocess.run(command, cwd=copy, check=True)
    library = ctypes.CDLL(str(path))
    with pytest.raises(
        headers.HeaderError, match=r"EmbeddingArgs has 104 bytes in libplanted\.so and 96 in .*: remove"
    ):
        headers.expect_sizes(library, headers.kernel_arguments(headers.PLUGINS))
    headers.expect_sizes(library, headers.kernel_arguments(copy))


def test_a_call_gives_every_field_and_no_other(copy):
    planted = headers.structures(copy)["EmbeddingArgs"]
    given = {
        name: None if kind is ctypes.c_void_p else 1
        for name, kind in headers.structures(headers.PLUGINS)["EmbeddingArgs"]._fields_
    }
    with pytest.raises(TypeError, match=r"EmbeddingArgs of plugins/cpu/kernels\.h: missing planted"):
        planted(**given)
    assert planted(**given, planted=7).planted == 7
    with pytest.raises(TypeError, match="unknown planted"):
        headers.structures(headers.PLUGINS)["EmbeddingArgs"](**given, planted=7)


@pytest.mark.parametrize("field", ["int32_t rows, columns;", "bool greedy;", "float scale[4];", "int64_t first : 3;"])
def test_a_field_that_ctypes_would_get_wrong_is_refused(copy, field):
    header = copy / "cpu" / "kernels.h"
    header.write_text(header.read_text().replace(PLANTED, f"    {field}\n"))
    with pytest.raises(headers.HeaderError, match=f"EmbeddingArgs has a field .* {field[:5]}"):
        headers.structures(copy)


def test_every_kernel_of_the_list_is_in_the_library():
    library = kernels.library()
    assert {"linear", "tree_attention"} <= headers.kernel_arguments(headers.PLUGINS).keys()
    for name in headers.kernel_arguments(headers.PLUGINS):
        assert getattr(library, f"redraft_{name}")
