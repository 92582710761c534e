"""What tests of the build scripts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.tiny import tiny_target, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen2 checkpoint of the tiny target's shape."""
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny_target(), folder)
    return folder
