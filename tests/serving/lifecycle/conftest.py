"""A service on the fake worker, which tests may kill."""

from __future__ import annotations

import pytest

from tests.serving.client_side import FAKE_WORKER, start


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=FAKE_WORKER)
