"""Scripts that are told to use the CPU hide the GPU from themselves and their children, not from other tests; a target
for those that start other scripts."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Whitespace

from model_defs.target import Target
from tests.engines.tiny import random_model, tiny_target, write_model


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
