"""Front ends on the toy engine that the tests of all files here share, as a start takes longer than most of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.openai.model import ServedModel
from tests.openai.serving import KEYS, FrontEnd, front_end, toy_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def model(bundle: Path) -> ServedModel:
    """The bundle as the front end sees it, without any process."""
    return ServedModel(bundle)


@pytest.fixture(scope="session")
def server(bundle: Path) -> Iterator[FrontEnd]:
    """One that answers without delay."""
    with tempfile.TemporaryDirectory(prefix="redraft-test-") as folder, front_end(Path(folder), bundle) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(bundle: Path) -> Iterator[FrontEnd]:
    """One whose every step takes 100 ms."""
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, delay=0.1) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def locked_server(bundle: Path) -> Iterator[FrontEnd]:
    """One that asks for a key of two, and has a site and a name of its own."""
    own = {"key": "  ".join(KEYS), "allow_host": ["My.example"], "model_name": "my-name"}
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, **own) as running,
    ):
        yield running
