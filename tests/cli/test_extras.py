"""What an installation has to bring: the packages that each command imports are those of its extra, one that is missing
is named with its extra, and the run time imports no torch. Extras and pins agree."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from redraft.cli import COMMANDS
from redraft.serving.tritonserver import PYTRITON
from tests.conftest import ROOT
from tests.test_layout import modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"runtime": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
FILES = sorted((ROOT / "requirements").glob("*.txt"))
OWN = {"redraft", "benchmarks", "studies", "build", "deploy"}
GIVEN = {"pydantic_core", "annotated_types", "starlette", "triton_python_backend_utils", "tensorrt"}
"""Modules that no extra declares: parts of pydantic and FastAPI, Triton's in its processes, and TensorRT, gigabytes
that a message says how to install."""
RUN_TIME = ("redraft.llm", "redraft.worker.server", "redraft.openai.server", "redraft.serving.supervisor")
RUN_TIME += ("redraft.serving.guard.server", "redraft.engines.openvino", "redraft.cli.chat", "redraft.cli.doctor")
HEAVY = ("torch", "transformers", "redraft.compiler", "redraft.training", "redraft.model_defs")
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
from redraft.cli import COMMANDS, main

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
said = {{}}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(name, "--help")
        except SystemExit as end:
            status = end.code
    said[name] = status, out.getvalue()
print(json.dumps(said))
"""


def declared(*extras: str) -> set[str]:
    """Return the distributions that an installation with these extras declares, those of extras in extras too."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    wanted = [Requirement(text) for text in texts]
    names = {canonicalize_name(one.name) for one in wanted if one.name != "redraft"}
    return names.union(*(declared(*one.extras) for one in wanted if one.name == "redraft"))


def installed_with(names: set[str]) -> set[str]:
    """Distributions that come with these, by the records of this environment."""
    result: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        try:
            required = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # for another system
            continue
        result.add(name)
        extras = {extra for one in required for extra in one.extras}
        here = {canonicalize_name(one.name) for one in required
                if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras})}  # fmt: skip
        waiting |= here - result
    return result


@cache
def distributions() -> dict[str, set[str]]:
    """The distributions that bring each top-level module."""
    return {name: set(map(canonicalize_name, found)) for name, found in metadata.packages_distributions().items()}


def imported(statements: list[ast.stmt], inside: bool) -> Iterator[tuple[str, str]]:
    """Modules that statements import, and a name from each or ""; with `inside` what functions import too."""
    for node in statements:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse, inside)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif inside or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from imported(getattr(node, field, []), inside)


@cache
def imports(module: str, inside: bool = False) -> frozenset[str]:
    """Modules that importing one imports; with `inside` also those that running it does."""
    known, found = modules(), set()
    for name, attribute in imported(ast.parse(known[module].read_text()).body, inside):
        found.add(f"{name}.{attribute}" if f"{name}.{attribute}" in known else name)
    return frozenset(found | {".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 1)})


def third_party(module: str) -> set[str]:
    """Top-level modules of others that are imported where a module and all that it imports are imported."""
    known, seen, waiting = modules(), set(), {module}
    while waiting:
        seen |= waiting
        waiting = {name for one in waiting if one in known for name in imports(one)} - seen
    return {name.partition(".")[0] for name in seen if name not in known} - sys.stdlib_module_names - OWN - GIVEN


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_its_extra_declares(command):
    """A package that another one happens to bring is gone when that one changes its mind."""
    module = COMMANDS[command].target.partition(":")[0]
    brought, names = distributions(), declared(COMMANDS[command].extra)
    wanted = third_party(f"redraft.cli.{module}")
    assert {name for name in wanted if not brought[name] & names} == set()


def test_all_imports_are_declared():
    """Those inside functions too, which the test above does not follow."""
    brought, names = distributions(), declared(*PROJECT["optional-dependencies"])
    for module in (name for name in modules() if name.startswith("redraft")):
        tops = {name.partition(".")[0] for name in imports(module, inside=True)}
        wanted = tops - sys.stdlib_module_names - OWN - GIVEN
        assert {name for name in wanted if not brought.get(name, set()) & names} == set(), module


def test_without_extras_a_command_works_or_names_its_own():
    base = installed_with(declared())
    missing = {name for name, found in distributions().items() if not found & base} - OWN - {"_distutils_hack"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS.format(missing=sorted(missing))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.keys() == COMMANDS.keys()
    for name, (status, text) in said.items():
        if status:
            assert status == 1
            message = rf"redraft {name} needs the package [\w.]+: \S*pip install 'redraft\[{COMMANDS[name].extra}\]'\n"
            assert re.fullmatch(message, text), text
        else:
            assert text.startswith("Usage: redraft"), text
    # what a bundle needs where it runs
    assert {name for name, (status, _) in said.items() if not status} >= {"chat", "doctor"}


def test_messages_name_extras_that_exist():
    named = set()
    for file in {*modules().values(), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}:
        text = file.read_text()
        named |= set(re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", text))
        named |= {
            extra for extras in re.findall(r"(?:redraft|\.whl\)?)\[([\w,-]+)\]", text) for extra in extras.split(",")
        }
    assert named <= PROJECT["optional-dependencies"].keys()
    assert named >= {"serve", "build", "train", "ranks", "telemetry", "parquet"}


@pytest.mark.parametrize("imported", [RUN_TIME, ("redraft.cli", "redraft.cli.service")], ids=["run time", "commands"])
def test_the_run_time_imports_no_torch(imported):
    """A service would hold a gigabyte more, and start seconds later; without torch it would not start."""
    heavy = HEAVY if imported is RUN_TIME else HEAVY[:2]
    program = f"import sys, {', '.join(imported)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_paths_of_the_models_under_triton_need_its_requirements_only():
    """Their process has no other packages."""
    lines = (ROOT / "requirements-triton.txt").read_text().splitlines()
    names = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    brought = distributions()
    for file in Path(ROOT, "triton_repo").glob("*/1/model.py"):
        wanted = {
            name
            for module, _ in imported(ast.parse(file.read_text()).body, inside=True)
            if module.startswith("redraft")
            for name in third_party(module)
        }
        assert {name for name in wanted if not brought[name] & names} == set(), file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_extras_and_pins_agree(file):
    lines = file.read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("-r ")]
    wanted = [Requirement(text) for text in EXTRAS[file.stem]]
    included = {f"-r {extra}.txt" for one in wanted if one.name == "redraft" for extra in one.extras}
    assert included == {line for line in lines if line.startswith("-r ")}
    by_name = {one.name: one for one in wanted if one.name != "redraft"}
    assert by_name.keys() == {pin.name for pin in pins}
    for pin in pins:
        (version,) = pin.specifier
        assert version.operator == "=="
        assert by_name[pin.name].specifier.contains(version.version)
        assert by_name[pin.name].extras == pin.extras


def test_requirements_are_all_of_them_each_with_one_version():
    text = (ROOT / "requirements.txt").read_text()
    assert sorted(re.findall(r"^-r (.+)$", text, re.MULTILINE)) == [f"requirements/{file.name}" for file in FILES]
    pins = [line for file in FILES for line in file.read_text().splitlines() if not line.startswith("-r ")]
    assert len(set(pins)) == len({pin.split("==")[0] for pin in pins})


def test_triton_server_has_one_version():
    assert PYTRITON in (ROOT / "Makefile").read_text()
