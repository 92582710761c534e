"""Who gets slots and rows of the real scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from redraft import request_state
from redraft.metrics import ENDED
from redraft.scheduling import scheduler as module
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import LIMITS, PLANS, make
from tests.toy_engine import ToyEngine, only


def test_a_short_prompt_overtakes_long_ones_for_rows_and_for_a_slot():
    """The long ones take slots one by one, and finish under short ones that come without end."""
    engine = ToyEngine(slots=3)
    scheduler = Scheduler(engine, replace(LIMITS, max_queue=20), only(PLANS["best_first"]))
    for key in range(3):
        scheduler.submit(make(f"long {key}", prompt=[key + 1] * 150, max_tokens=1))
    scheduler.step()
    assert (scheduler.status().running, scheduler.status().waiting) == (1, 2)
    finished = list[str]()
    for step in range(150):
        if step % 3 == 0:
            scheduler.submit(make(f"short {step}", prompt=[step + 1] * 12, max_tokens=1))
        finished += [output.key for output in scheduler.step()]
        assert engine.rows_per_step[-1] <= LIMITS.prefill_chunk
        if step % 3 == 1:
            assert f"short {step - 1}" in finished
    assert [key for key in finished if key.startswith("long")] == ["long 0", "long 1", "long 2"]


def test_only_the_earliest_prompts_of_a_long_queue_are_looked_at(monkeypatch):
    """A step must not take longer, the longer the queue is."""
    monkeypatch.setattr(module, "LOOKED_AT", 3)
    scheduler = Scheduler(ToyEngine(slots=2), replace(LIMITS, slots=2, max_queue=20), only(PLANS["best_first"]))
    for key, length in enumerate((30, 20, 25, 10, 5)):
        scheduler.submit(make(key, prompt=[key + 1] * length, max_tokens=1))
    finished = list[int]()
    while not scheduler.idle:
        finished += [output.key for output in scheduler.step()]
    assert finished[0] == 1, "the shortest of the first three"
    assert finished.index(4) < finished.index(2), "and then of those that have moved up"


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds: an item that a test sets."""
    now = [100.0]
    for each in (module, request_state):
        monkeypatch.setattr(each, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_deadlines_end_requests_that_run_are_prefilled_and_wait(clock):
    """Each between two steps and with the text so far; its slot is free for others."""
    scheduler = Scheduler(ToyEngine(slots=2), replace(LIMITS, slots=2), only(PLANS["merged"]))
    texts = dict.fromkeys(("running", "long", "waiting", "other"), "")
    reasons = {}

    def step() -> None:
        for output in scheduler.step():
            texts[output.key] += output.text
            if output.finish_reason:
                reasons[output.key] = output.finish_reason, output.stats.output_tokens

    scheduler.submit(make("running", prompt=[1], max_tokens=200, end_ids=frozenset(), timeout_s=9))
    step()
    for key, timeout_s in (("long", 8), ("waiting", 7)):
        scheduler.submit(make(key, prompt=[2] * 99, max_tokens=9, timeout_s=timeout_s))
    step()
    clock[0] += 6.9
    step()
    assert (scheduler.status().running, scheduler.status().waiting, reasons) == (2, 1, {})
    for key in ("waiting", "long", "running"):
        clock[0] += 1
        step()
        assert reasons.pop(key)[0] == "timeout"
        assert reasons == {}
    assert scheduler.idle
    assert (len(texts["running"]) > 4, texts["long"], texts["waiting"]) == (True, "", "")
    assert scheduler.metrics.registry.get_sample_value(ENDED.series, {"finished_reason": "timeout"}) == 3
    scheduler.submit(make("other", prompt=[3], max_tokens=3, end_ids=frozenset(), timeout_s=9))
    while not scheduler.idle:
        step()
    assert reasons == {"other": ("length", 3)}
