"""A guard without a Triton server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.serving.guard.stand_in import Guarded, guarded


@pytest.fixture(scope="session")
def running_guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("g")) as seen:
        yield seen


@pytest.fixture
def guard(running_guard: Guarded) -> Guarded:
    """The running one, which has seen nothing yet, and holds no body of an earlier test's requests."""
    wait_until(lambda: not running_guard.room._taken)
    running_guard.requests.clear()
    running_guard.calls.clear()
    running_guard.ended.clear()
    return running_guard
