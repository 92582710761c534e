"""The joint-law test kills every mutant of the constructions and verifiers.

Slow, as each is a run of its own. It would catch a joint-law test that has become too weak to find a bias.
"""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, Mutant, is_killed, trial

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant):
    assert is_killed(trial(mutant))
