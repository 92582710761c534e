"""Runs tests of the compiled trees on libraries of their own: with sanitizers, and with planted bugs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from redraft.decoding.token_tree import Node, TokenTree
from redraft.plugins.headers import PLUGINS
from tests.conftest import ROOT

EXAMPLES = int(os.environ.get("TREES_EXAMPLES", "300"))
"""Of each property. The runs on libraries compiled for a test make fewer, as they take longer."""
TOKENS = 5
"""Different tokens: so few that paths, guesses and siblings repeat."""


@st.composite
def forests(draw: st.DrawFn) -> TokenTree:
    """Trees of odd sizes, up to more than a mask word, with equal scores, scores above their parents' and siblings of
    one token."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    trees: list[list[Node]] = []
    for size in draw(st.lists(st.sampled_from([1, 1, 2, 5, 16, 40]), min_size=1, max_size=4)):
        scores = -rng.choice([0.25, 0.5, 1.0, np.inf], size, p=[0.4, 0.3, 0.28, 0.02])
        tokens = rng.integers(0, TOKENS, size).tolist()
        nodes: list[Node] = [(tokens[0], -1, 0.0)]
        nodes += [(tokens[node], int(rng.integers(0, node)), float(scores[node])) for node in range(1, size)]
        trees.append(nodes)
    return TokenTree.from_nodes(trees)


def in_arrays(tree: TokenTree) -> TokenTree:
    """The same trees, that know their arrays only."""
    return TokenTree(tree.offsets, tree.tokens, tree.parents, tree.scores)


def in_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"TREES_EXAMPLES": "60"} | variables
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=ROOT)


def run_against(library: Path, file: str, tests: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a file, by an expression of their names, on another library."""
    code = f"""
import pytest, sys
from pathlib import Path
from hypothesis import Phase, settings
from redraft.plugins.trees import native
# Whether a bug is found matters, not the smallest example of it, which takes minutes to find.
settings.register_profile("found", settings.get_profile("ci"), phases=[Phase.generate])
class Found:
    def pytest_sessionstart(self):  # after tests/conftest.py
        settings.load_profile("found")
native.kernels_path = lambda: Path({str(library)!r})
failed = pytest.main([{file!r}, "-qsx", "-m", "not slow", "-k", {tests!r}, "-p", "no:cacheprovider"], plugins=[Found()])
sys.exit(failed or {str(library)!r} not in Path("/proc/self/maps").read_text())
"""
    return in_process(code, **variables)


def run_sanitized(folder: Path, file: str, tests: str) -> subprocess.CompletedProcess[str]:
    """Run them under the address and undefined-behaviour sanitizers, in a process that loads these first."""
    library = folder / "trees.so"
    _compile(PLUGINS, library, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    # The sanitizer wraps what throws exceptions, and finds it only if that is there.
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    options = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    return run_against(library, file, tests, **options)


def run_mutant(folder: Path, name: str, old: str, new: str, file: str, tests: str) -> subprocess.CompletedProcess[str]:
    """Run them where a piece of the source file `name` is another."""
    for copied in ("trees", "cpu", "operators"):
        shutil.copytree(PLUGINS / copied, folder / copied)
    source, library = folder / "trees" / name, folder / "trees.so"
    assert source.read_text().count(old) == 1
    source.write_text(source.read_text().replace(old, new))
    _compile(folder, library, "-O1")
    return run_against(library, file, tests)


def _compile(folder: Path, library: Path, *flags: str) -> None:
    flags = ("-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", *flags)
    subprocess.run(["g++", *flags, folder / "trees" / "c_api.cpp", "-o", library], check=True)
