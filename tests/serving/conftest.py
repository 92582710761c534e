"""Fixtures of the serving layer's tests: one service per module."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.serving import launcher
from tests.serving.client_side import GrpcStream, Service


@pytest.fixture(scope="session")
def fake_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def run_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="redraft-test-") as folder:
        yield Path(folder)
        launcher.stop(Path(folder))


@pytest.fixture
def stream(service: Service) -> Iterator[GrpcStream]:
    connection = GrpcStream(service.grpc)
    yield connection
    connection.close()
