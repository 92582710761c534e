"""The names of TensorRT's that the product uses are in the bindings of every version that it takes."""

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.plugins.cuda.test_declarations import OLDEST, fetched_bindings
from tests.plugins.fake_tensorrt import installed_bindings

ROOT = Path(__file__).parents[3]
TENSORRTS_OWN = {
    "redraft/compiler/writers/engine_builder.py": (
        "trt self._trt builder definition parser options profile layer tensor registry"
    ),
    "plugins/cuda/quick_plugin.py": "trt",
    "redraft/engines/tensorrt/library.py": "module",
    "redraft/engines/tensorrt/session.py": (
        "trt self._trt self._runtime self._engine context self._context config kinds"
    ),
}
"""What the library and its objects are called in each file."""
ONLY_RTX = {
    *("DynamicShapesKernelSpecializationStrategy", "EAGER", "LAZY", "dynamic_shapes_kernel_specialization_strategy"),
    *("REQUIRE_USER_ALLOCATION", "is_stream_capturable"),
}
ONLY_FULL = {"PREFER_AOT_PYTHON_PLUGINS"}
BINDINGS = {
    "TensorRT, installed": (installed_bindings, ONLY_RTX),
    f"TensorRT {OLDEST}": (lambda: fetched_bindings(OLDEST), ONLY_RTX),
    "TensorRT for RTX": (lambda: Path(importlib.util.find_spec("tensorrt_rtx_bindings").origin).parent, ONLY_FULL),
}
"""Where each library's are, and what they do not have."""


def names(source: str, roots: str) -> set[str]:
    """The attributes of these roots, and of what they give."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and node.attr[0] != "_"]
    own = tuple(f"{root}." for root in roots.split())
    return {node.attr for node in found if ast.unparse(node).startswith(own)}


def test_names_are_found_behind_calls_and_lists():
    source = "a = trt.Builder(1).create(x.y)[0].flags; self.trt.no; trt.__version__"
    assert names(source, "trt") == {"Builder", "create", "flags"}


@pytest.mark.parametrize("library", BINDINGS)
def test_every_name_is_in_the_bindings(library):
    """As a string of the compiled library, which cannot be imported without TensorRT's."""
    find, lacks = BINDINGS[library]
    (compiled,) = find().glob("*.so")
    text = compiled.read_bytes()
    used = set.union(*(names((ROOT / file).read_text(), roots) for file, roots in TENSORRTS_OWN.items()))
    assert len(used) > 70
    assert {name for name in used if name.encode() + b"\0" not in text} == lacks
