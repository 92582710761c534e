"""What holds of the code's structure: no import cycle, and layers that do not import what is above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from redraft.bundle.backends import BACKENDS
from tests.conftest import ROOT

RUN_TIME = {"redraft", "redraft.errors", "redraft.plugins"}
PRODUCT = RUN_TIME | {"redraft.model_defs", "redraft.compiler", "redraft.training", "redraft.cli"}
BELOW = {
    "redraft.errors": set(),
    "redraft.plugins": {"redraft.errors"},
    "redraft": {"redraft.errors", "redraft.plugins"},
    "redraft.model_defs": RUN_TIME,
    "redraft.compiler": RUN_TIME | {"redraft.model_defs"},
    "redraft.training": RUN_TIME | {"redraft.model_defs"},
    "redraft.__main__": PRODUCT,
    "redraft.cli": PRODUCT,
    "benchmarks": PRODUCT,
    "studies": PRODUCT | {"benchmarks"},
}
"""What each layer may import of the repository beside itself; `redraft` is the run time, all that is in no other."""


def modules() -> dict[str, Path]:
    """Every module by its name, those of linked folders under redraft."""
    folders = ("redraft", "redraft/plugins", "redraft/model_defs", "benchmarks", "studies")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
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
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("resolve_name", "import_module"):
            match ast.unparse(node):
                case "resolve_name(bundle.config.backend.engine)":
                    yield from (backend.engine.replace(":", ".") for backend in BACKENDS.values())
                case "resolve_name(config.backend.writer)":
                    yield from (backend.writer.replace(":", ".") for backend in BACKENDS.values())
                case "import_module(f'{__name__}.{module.name}')":
                    package = file.parent.relative_to(ROOT).as_posix().replace("/", ".")
                    yield from (f"{package}.{module.stem}" for module in file.parent.glob("*.py") if module != file)


@cache
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


def layer(module: str) -> str:
    return max((name for name in BELOW if f"{module}.".startswith(f"{name}.")), key=len)


def test_layers_import_only_what_is_below_them():
    for name, targets in graph().items():
        allowed = BELOW[layer(name)] | {layer(name)}
        above = {target for target in targets if layer(target) not in allowed}
        if name.startswith("redraft.engines"):
            above |= {target for target in targets if target.startswith("redraft.scheduling")}
        assert not above, name


def test_modules_that_strings_name_are_seen():
    found = graph()
    assert {"redraft.engines.openvino", "redraft.engines.tensorrt.engine"} < found["redraft.engines"]
    assert {"redraft.compiler.writers.openvino", "redraft.compiler.writers.tensorrt"} < found["redraft.compiler.bundle"]
    assert "redraft.decoding.construction" in found["redraft.decoding"]
