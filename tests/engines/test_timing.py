"""A clock around an engine's drafter."""

from redraft.engines.api import DrawingEngine, ResamplingEngine
from redraft.engines.timing import EngineClock, TimedDrafter
from tests.toy_engine import ToyEngine


def test_a_drafter_does_no_more_with_a_clock_than_without():
    drafter = TimedDrafter(ToyEngine(), EngineClock())
    assert not isinstance(drafter, DrawingEngine)
    assert not isinstance(drafter, ResamplingEngine)
