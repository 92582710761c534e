"""The supervisor's questions, which a thread of their own asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from redraft.serving.pulse import Pulse
from tests.conftest import wait_until


class Asked:
    """Something that answers as told: `step` lets one question end, which meanwhile waits, and waits for the next."""

    def __init__(self):
        self.asked, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.answer: Callable[[], bool] = lambda: True
        self.pulse = Pulse(self._question, period=0.0)
        self.asked.acquire()

    def _question(self) -> bool:
        self.asked.release()
        self._go.acquire()
        return self.answer()

    def step(self, answer: Callable[[], bool]) -> None:
        self.answer = answer
        self._go.release()
        assert self.asked.acquire(timeout=60)


def fail() -> bool:
    raise LookupError("a bug")


@pytest.mark.parametrize("none", [lambda: False, fail])
def test_silence_takes_two_questions_that_found_no_answer(none):
    thing = Asked()
    time.sleep(0.2)
    assert (thing.pulse.answered, thing.pulse.silence) == (False, 0.0), "nothing has been found yet"
    thing.step(none)
    assert (thing.pulse.answered, thing.pulse.silence) == (False, 0.0), "this process may have been stopped meanwhile"
    thing.step(none)
    assert thing.pulse.silence >= 0.2
    thing.step(lambda: True)
    assert (thing.pulse.answered, thing.pulse.silence) == (True, 0.0)


def test_answers_to_questions_before_a_reset_do_not_count():
    thing = Asked()
    thing.pulse.reset()
    thing.step(lambda: True)
    assert not thing.pulse.answered
    thing.step(lambda: True)
    assert thing.pulse.answered
    thing.pulse.reset()
    for _ in range(2):
        thing.step(lambda: False)
    assert thing.pulse.silence == 0.0, "only one of the two was asked after the reset"


def test_a_reset_asks_at_once():
    asked = threading.Semaphore(0)

    def answer() -> bool:
        asked.release()
        return True

    pulse = Pulse(answer, period=600.0)
    assert asked.acquire(timeout=60)
    wait_until(lambda: pulse.answered)
    pulse.reset()
    assert asked.acquire(timeout=60)
