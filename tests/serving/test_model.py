"""The base of the Triton models, without Triton."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from redraft.protocol import GenerateRequest


class Sender:
    def __init__(self):
        self.asked = 0

    def is_cancelled(self) -> bool:
        self.asked += 1
        return False


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace())
    return importlib.import_module("redraft.serving.model")


def test_many_requests_in_flight_are_asked_about_in_turn(module):
    """A question takes Triton 30 us: asking about thousands at once would hold up every response."""
    model = module.GenerationModel()
    senders = [Sender() for _ in range(100)]
    request = GenerateRequest(id="r", text="x", max_tokens=1)
    model._in_flight = {str(place): module.Exchange(request, sender) for place, sender in enumerate(senders)}
    model._poll_from = 0
    model._pass_on_cancellations()
    assert sum(sender.asked for sender in senders) == module.CANCELLATIONS_PER_POLL < 100
    for _ in range(3):
        model._pass_on_cancellations()
    assert {sender.asked for sender in senders} == {1}
