"""Clocks around engines pass on every call."""

import pytest

from redraft.engines.api import DraftEngine, DrawingEngine, Engine, ResamplingEngine
from redraft.engines.timing import EngineClock, TimedDrafter, TimedEngine
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import ToyEngine


def names(*protocols: type) -> set[str]:
    return {name for kind in protocols for name in vars(kind) if name[0] != "_"}


class Everything(DrawingToyEngine):
    def resample(self, chains, roots, noise=None):
        return self.draft(chains)


@pytest.fixture
def engine() -> Everything:
    return Everything("gumbel_top_k", (2, 1), 5)


def test_every_call_is_passed_on(engine):
    calls = names(Engine)
    assert calls >= {"execute", "close", "drafters"}
    assert calls <= set(dir(TimedEngine(engine, EngineClock())))
    calls = names(DraftEngine, DrawingEngine, ResamplingEngine)
    assert calls >= {"draft", "draw", "resample", "reads_context", "reads_text"}
    assert calls <= set(dir(TimedDrafter(engine, EngineClock())))


def test_a_drafter_does_no_more_with_a_clock_than_without():
    drafter = TimedDrafter(ToyEngine(), EngineClock())
    assert not isinstance(drafter, DrawingEngine)
    assert not isinstance(drafter, ResamplingEngine)
