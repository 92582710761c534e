"""Scripts that are told to use the CPU hide the GPU from themselves and their children, not from other tests."""

import os
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest.mock import patch

import pytest
import typer
from packaging.utils import canonicalize_name

from benchmarks.gpu.kit import GIVEN, NEEDED, closure

ROOT = Path(__file__).parents[3]
COMPILER = {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"}
OURS = {"redraft"}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield


BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def bare_environment(folder: Path) -> dict[str, str]:
    """Variables for child processes that find only what a CUDA machine has and what is packed."""
    given = closure(GIVEN, set(map(canonicalize_name, NEEDED))) | COMPILER | OURS
    found = given | closure(NEEDED, set())
    blocked = [
        module
        for module, distributions in packages_distributions().items()
        if not found & set(map(canonicalize_name, distributions))
    ]
    assert {"openvino", "tritonclient", "zmq", "onnx_ir", "gguf"} <= {*blocked}
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {blocked}\n{BARE}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


class Parsed(Exception):
    """Raised where a script would begin, once it has taken its arguments."""


def raise_parsed() -> None:
    raise Parsed


def parsed_by_typer(main: Callable, arguments: list[str]) -> dict:
    """What a typer script makes of its arguments."""
    app = typer.Typer()
    app.command()(main)
    return typer.main.get_command(app).make_context("script", list(arguments)).params
