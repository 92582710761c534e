"""Who gets slots and rows of the real scheduler."""

from __future__ import annotations

from dataclasses import replace

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
