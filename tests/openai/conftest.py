"""A front end on the toy engine, which answers without delay, and one whose every step takes 100 ms."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.openai.serving import FrontEnd, front_end, toy_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[FrontEnd]:
    with tempfile.TemporaryDirectory(prefix="redraft-test-") as folder, front_end(Path(folder), bundle) as running:
        yield running


@pytest.fixture(scope="module")
def slow_server(bundle: Path) -> Iterator[FrontEnd]:
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, delay=0.1) as running,
    ):
        yield running
