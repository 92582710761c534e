"""A front end whose model says what the last message says, in the form of Hermes' calls."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.openai.parrot_worker import PARROT_LIMITS, PARROT_TEMPLATE, VOCABULARY
from tests.openai.serving import FrontEnd, front_end, toy_bundle


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    bundle = toy_bundle(tmp_path_factory.mktemp("parrot"), PARROT_TEMPLATE, VOCABULARY, PARROT_LIMITS.max_len)
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, worker="tests/openai/parrot_worker.py") as running,
    ):
        yield running
