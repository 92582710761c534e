"""Scripts that are told to use the CPU hide the GPU from themselves and their children, not from other tests."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield
