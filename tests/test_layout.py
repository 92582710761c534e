"""What holds of the code's structure: no import cycle, and layers that do not import what is above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from redraft.bundle.backends import BACKENDS
from tests.conftest import ROOT

BELOW = {
    "redraft": {"redraft"},
    "model_defs": {"model_defs", "redraft"},
    "compiler": {"compiler", "model_defs", "redraft"},
    "training": {"training", "model_defs", "redraft"},
    "benchmarks": {"benchmarks", "training", "compiler", "model_defs", "redraft"},
    "studies": {"studies", "benchmarks", "training", "compiler", "model_defs", "redraft"},
}
"""What each package may import of the repository; redraft.plugins, the operators, only of itself."""


def modules() -> dict[str, Path]:
    """Every module of the packages by its name, operators under redraft.plugins."""
    files = [file for package in BELOW for file in (ROOT / package).rglob("*.py")]
    files += (ROOT / "redraft" / "plugins").rglob("*.py")
    names = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def imports(file: Path) -> Iterator[str]:
    """Names that a module imports when it runs, by strings too: modules, or attributes of modules."""
    tree = ast.parse(file.read_text())
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    typing = {id(inner) for node in guarded for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            match ast.unparse(node):
                case "resolve_name(bundle.config.backend.engine)":
                    yield from (backend.engine.replace(":", ".") for backend in BACKENDS.values())
                case "resolve_name(config.backend.writer)":
                    yield from (backend.writer.replace(":", ".") for backend in BACKENDS.values())
                case "import_module(f'{__name__}.{module.name}')":
                    package = file.parent.relative_to(ROOT).as_posix().replace("/", ".")
                    yield from (f"{package}.{module.stem}" for module in file.parent.glob("*.py") if module != file)


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    found = {}
    for name, file in known.items():
        targets = {one if one in known else one.rpartition(".")[0] for one in imports(file)}
        found[name] = targets & known.keys() - {name}
    return found


def test_no_module_imports_itself_over_others():
    list(TopologicalSorter(graph()).static_order())


def test_packages_import_only_what_is_below_them():
    for name, targets in graph().items():
        allowed = {"redraft.plugins"} if name.startswith("redraft.plugins") else BELOW[name.partition(".")[0]]
        above = {one for one in targets if not one.startswith(tuple(allowed))}
        if name.startswith("redraft.engines"):
            above |= {one for one in targets if one.startswith("redraft.scheduling")}
        assert not above, name


def test_modules_that_strings_name_are_seen():
    found = graph()
    assert {"redraft.engines.openvino", "redraft.engines.tensorrt.engine"} < found["redraft.engines"]
    assert {"compiler.writers.openvino", "compiler.writers.tensorrt"} < found["compiler.bundle"]
    assert "redraft.decoding.construction" in found["redraft.decoding"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_names_functions_that_exist(backend):
    """Those of TensorRT too, which other tests only reach with a GPU."""
    for named in (BACKENDS[backend].engine, BACKENDS[backend].writer):
        module, _, name = named.partition(":")
        defined = {getattr(node, "name", "") for node in ast.parse(modules()[module].read_text()).body}
        assert name in defined, named
