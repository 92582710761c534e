"""On an engine that leaves the host free, texts are read and sent while a device executes: the same ones as without."""

from __future__ import annotations

import time

import pytest

from redraft.bundle.method import MethodConfig
from redraft.engines.timing import EngineClock, TimedEngine
from redraft.request import joined
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import LIMITS, make
from tests.toy_engine import TOY, ToyEngine

PLANS = {TOY: MethodConfig(construction="best_first", ngram=True, tree_budget=9)}


class ToyDevice(ToyEngine):
    """Leaves the host free for `device_s` of each step if it `overlaps`."""

    def __init__(self, overlaps=True, device_s=0.0):
        super().__init__()
        self.overlaps, self.executing, self.device_s = overlaps, False, device_s

    def execute(self, batch, samplers=None, meanwhile=None):
        done = time.perf_counter() + self.device_s
        results = super().execute(batch, samplers)
        assert (meanwhile is not None) == self.overlaps
        if meanwhile is not None:
            self.executing = True
            meanwhile()
            self.executing = False
        time.sleep(max(done - time.perf_counter(), 0.0))
        return results


def requests():
    fields = [{"stream": True}, {"stream": True, "stop_words": ["w7"]}, {"sampling": {"temperature": 1.0, "seed": 3}}]
    return [make(key, max_tokens=17 + 6 * key, **fields[key % 3]) for key in range(5)]


def served(engine, sequences, send):
    """The outputs of each request in their order, and whether each came while the engine executed."""
    scheduler, parts = Scheduler(engine, LIMITS, PLANS), {sequence.key: [] for sequence in sequences}

    def take(outputs):
        for output in outputs:
            parts[output.key].append((output, getattr(engine, "executing", False)))
            send(scheduler, output)

    for sequence in sequences:
        scheduler.submit(sequence)
    while not scheduler.idle:
        scheduler.step_and_send(take)
    return parts


def answers(parts):
    wholes = {key: joined([output for output, _ in outputs]) for key, outputs in parts.items()}
    return {key: (whole["text"], whole["token_ids"], whole["finish_reason"]) for key, whole in wholes.items()}


def ignore(scheduler, output):
    """Nothing."""


def test_texts_are_those_of_an_engine_on_the_host():
    overlapped, plain = served(ToyDevice(), requests(), ignore), served(ToyEngine(), requests(), ignore)
    assert answers(overlapped) == answers(plain) == answers(served(ToyDevice(overlaps=False), requests(), ignore))


def test_what_goes_on_is_sent_while_the_device_executes_and_what_begins_or_ends_at_once():
    parts = served(ToyDevice(), requests(), ignore)
    outputs = [(index, *each) for sent in parts.values() for index, each in enumerate(sent)]
    assert sum(executing for _, _, executing in outputs) > 5
    assert all(executing == (index > 0 and output.finish_reason is None) for index, output, executing in outputs)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_first_text_is_sent_by_the_step_that_prefills(overlaps):
    scheduler, sent = Scheduler(ToyDevice(overlaps), LIMITS, PLANS), []
    scheduler.submit(requests()[0])
    while not sent:
        prefilling = scheduler.prefilling
        scheduler.step_and_send(sent.extend)
    assert prefilling
    assert len(sent[0].token_ids) == 1


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_sending_takes_is_no_part_of_a_step_unless_it_outlasts_the_device(overlaps):
    """Of the target's time as the budgets learn it, too."""
    scheduler, times = Scheduler(ToyDevice(overlaps, device_s=0.03), LIMITS, PLANS), []
    scheduler.metrics.note_step = lambda step_s, engine_s, draft_s, gaps_s: times.append((step_s, engine_s - draft_s))
    scheduler.submit(requests()[0])

    def step(send_s):
        scheduler.step_and_send(lambda outputs: time.sleep(send_s) if outputs else None)
        return times[-1]

    while not scheduler.totals.output_tokens:
        first = step(0.25)  # the first text is sent after the step, whose device had nothing to send meanwhile
    assert 0.03 <= first[1] <= first[0] < 0.2
    within = step(0.005)
    assert 0.03 <= within[1] <= within[0] < 0.2
    step_s, target_s = step(0.25)
    assert (0.25 <= target_s <= step_s) if overlaps else (0.03 <= target_s <= step_s < 0.2)


def test_a_step_returns_its_own_outputs_on_any_engine():
    engine, (first, *_) = ToyDevice(), requests()
    scheduler = Scheduler(engine, LIMITS, PLANS)
    scheduler.submit(first)
    engine.overlaps = False  # what the engine expects: nothing to do meanwhile
    assert [len(scheduler.step()) for _ in range(3)][1:] == [1, 1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_sending_may_cancel(overlaps):
    """As where it shows that a client is gone: the request ends with the next step, and nothing else changes."""
    sent = []

    def cancel(scheduler, output):
        sent.append(output.key)
        if sent.count(0) == 2:
            scheduler.cancel(0)

    parts = served(ToyDevice(overlaps), requests(), cancel)
    whole = answers(served(ToyDevice(overlaps), requests(), ignore))
    text, tokens, reason = answers(parts).pop(0)
    assert reason == "cancelled"
    assert 0 < len(tokens) < len(whole[0][1])
    assert whole[0][0].startswith(text)
    assert {key: answer for key, answer in answers(parts).items() if key} == {k: v for k, v in whole.items() if k}


def test_the_clock_hands_on_what_the_host_does_meanwhile():
    assert TimedEngine(ToyDevice(), EngineClock()).overlaps
    assert not TimedEngine(ToyDevice(overlaps=False), EngineClock()).overlaps
    assert not TimedEngine(ToyEngine(), EngineClock()).overlaps
