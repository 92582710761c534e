"""The joint-law test kills every mutant of the constructions and verifiers.

Slow, as each is a run of its own. It would catch a joint-law test that has become too weak to find a bias.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from types import CodeType

import pytest

from tests.mutants import MUTANTS, Mutant, is_killed, planted, trial


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant):
    assert is_killed(trial(mutant))


def test_every_mutant_names_what_there_is():
    """One that names a value which a change has renamed would only raise an error."""
    for mutant in MUTANTS:
        with planted(mutant):
            known = mutant.function.__globals__.keys() | vars(builtins).keys()
            assert set(global_names(mutant.function.__code__)) <= known, mutant.name


def global_names(code: CodeType) -> Iterator[str]:
    """The global names that a function reads, and those of its comprehensions."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)
