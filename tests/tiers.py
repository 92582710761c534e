"""Cases of a parametrized test that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that only `make test-slow` runs."""


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases, of which all but the `quick` ones are slow."""
    return [case if case in quick else slow(case) for case in cases]
