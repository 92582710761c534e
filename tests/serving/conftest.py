"""Fixtures of the serving layer's tests: a service on the fake worker for all of them, and folders for others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.serving import launcher
from tests.serving.client_side import FAKE_WORKER, GrpcStream, Service, start


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


@pytest.fixture(scope="session")
def fake_service(fake_bundle: Path) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="redraft-test-") as folder:
        yield start(Path(folder), fake_bundle, worker_command=FAKE_WORKER)
        launcher.stop(Path(folder))


@pytest.fixture
def service(fake_service: Service) -> Service:
    """The one that files share, as a start takes seconds. Tests may kill it or a part of it."""
    if not launcher.is_running(fake_service.run_dir):
        launcher.serve(fake_service.settings, fake_service.run_dir.path, lambda activity: None)
    return fake_service


@pytest.fixture
def stream(service: Service) -> Iterator[GrpcStream]:
    connection = GrpcStream(service.grpc)
    yield connection
    connection.close()
