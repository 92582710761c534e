"""Scripts that are told to use the CPU hide the GPU from themselves and their children, not from other tests; a target
for those that start other scripts."""

import dataclasses
import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.gpu.kit import GIVEN, NEEDED, closure
from model_defs.target.model import Target
from tests.engines.tiny import random_model, tiny_target, write_model

ROOT = Path(__file__).parents[3]
COMPILER = {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"}
OURS = {"redraft"}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def target() -> Target:
    """The tiny one, for texts of the usual length; of a Llama, whose tokenizer may be any."""
    return random_model(dataclasses.replace(tiny_target().config, max_position=1024, qkv_bias=False))


@pytest.fixture(scope="session")
def model(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder, as the build scripts take it: words t0 to t110 and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    write_model(target, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (folder / "chat_template.jinja").write_text("t3 {{ messages[0]['content'] }} t4")
    return folder


BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def bare_environment(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Variables for child processes that find only what a CUDA machine has and what is packed, less the packages
    `without`."""
    given = closure(GIVEN, set(map(canonicalize_name, NEEDED))) | COMPILER | OURS
    found = (given | closure(NEEDED, set())) - set(without)
    blocked = [
        module
        for module, distributions in packages_distributions().items()
        if not found & set(map(canonicalize_name, distributions))
    ]
    assert {"openvino", "tritonclient", "zmq", "onnx_ir", "gguf", *without} <= {*blocked}
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {blocked}\n{BARE}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Children of this test run as on a CUDA machine, with what is packed."""
    with patch.dict(os.environ, bare_environment(tmp_path_factory.mktemp("bare"))):
        yield
