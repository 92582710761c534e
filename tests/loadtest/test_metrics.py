"""Metric definitions, on timelines whose figures are known."""

import math

import pytest

from redraft.loadtest.metrics import (
    Timeline,
    Window,
    acceptance,
    concurrency,
    distribution,
    meets,
    parse_slo,
    steady_window,
    summarize,
)


def timeline(sent=0.0, first=0.1, gaps=(0.05, 0.05), tokens=5, error=None, **fields):
    """A request whose chunks come `first` seconds after sending and then after each gap; it ends with the last."""
    times = [sent + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    due = fields.pop("due", sent)
    return Timeline("q", "c", 7, 0, due, sent, times, times[-1], tokens, error=error, **fields)


def test_definitions_on_one_request():
    """Of five tokens in three chunks."""
    request = timeline()
    assert request.ttft == pytest.approx(100)
    assert request.e2el == pytest.approx(200)
    assert request.tpot == pytest.approx((200 - 100) / 4)
    assert request.itl == pytest.approx([50, 50])


def test_times_count_from_the_due_moment():
    """A generator that falls behind would hide what a server makes its clients wait."""
    late = timeline(sent=3.0, due=1.0)
    assert late.ttft == pytest.approx(2100)
    assert late.e2el == pytest.approx(2200)
    assert late.tpot == pytest.approx(25)
    assert summarize([late])["max_send_delay_ms"] == pytest.approx(2000)
    assert summarize([late])["duration_s"] == pytest.approx(2.2)


def test_the_steady_window_leaves_out_ramp_and_tail():
    """One request a second of 2 s each, of which the last turn comes later and does not prolong the window."""
    runs = [timeline(sent=float(second), first=1.0, gaps=(1.0,), tokens=4) for second in range(11)]
    runs[-1].output_tokens = 100
    late = timeline(sent=30.0)
    late.turn = 1
    window = steady_window([*runs, late], 3.0)
    assert window == Window(3.0, 10.0)
    steady = summarize([*runs, late], {"ttft": 2000}, window)
    assert (steady["requests"], steady["duration_s"]) == (8, 7.0)
    assert steady["request_throughput"] == pytest.approx(8 / 7), "ended from 5 s to 12 s, whenever they were due"
    assert steady["output_token_throughput"] == pytest.approx(4 * 8 / 7), "no chunk of the last answer, due at its end"
    assert steady["goodput"] == steady["requests_due_per_s"] == pytest.approx(8 / 7)
    runs[5].finished = 20.0
    stalled = summarize([*runs, late], None, window)
    assert stalled["request_throughput"] == pytest.approx(7 / 7), "one that is due in it and ends after it is missing"
    assert stalled["completed"] == 8
    assert steady_window(runs[:2], 3.0) is None
    assert steady_window([timeline() for _ in range(5)], 0.0) is None, "all at once has no steady part"


@pytest.mark.parametrize(("pace", "completed"), [(1.0, 1.0), (1.5, 1 / 1.5)])
def test_answers_that_take_longer_than_the_ramp(pace, completed):
    """One request a second, each answered 20 s later or, beyond saturation, one every `pace` seconds."""
    runs = [timeline(sent=float(s), first=15 + (pace - 1) * s, gaps=(5.0,)) for s in range(61)]
    steady = summarize(runs, None, steady_window(runs, 5.0))
    assert steady["requests_due_per_s"] == pytest.approx(1, rel=0.02)
    assert steady["request_throughput"] == pytest.approx(completed, rel=0.03)


def test_single_token_has_no_tpot():
    request = timeline(gaps=(), tokens=1)
    assert request.tpot is None
    assert request.itl == []
    assert meets(request, {"tpot": 1e-9})


def test_summary_of_a_run():
    requests = [timeline(sent=0), timeline(sent=0.1), timeline(sent=0.8, error="overloaded")]
    summary = summarize(requests, {"ttft": 150})
    assert summary["duration_s"] == pytest.approx(1.0)
    assert (summary["completed"], summary["errors"]) == (2, 1)
    assert summary["error_messages"] == {"overloaded": 1}
    assert summary["request_throughput"] == pytest.approx(2)
    assert summary["output_token_throughput"] == pytest.approx(10)
    assert summary["total_token_throughput"] == pytest.approx(24)
    assert summary["max_concurrency_seen"] == 2
    assert summary["ms_per_token"] == pytest.approx(40)
    assert summary["goodput"] == pytest.approx(2)
    assert summarize(requests, {"ttft": 99})["goodput"] == 0
    assert "goodput" not in summarize(requests)


def test_goodput_needs_every_limit():
    assert meets(timeline(), {"ttft": 150, "tpot": 30, "e2el": 250})
    assert not meets(timeline(), {"ttft": 150, "tpot": 20})
    assert not meets(timeline(error="x"), {})


def test_summary_without_success_has_no_figures():
    summary = summarize([Timeline("q", "c", error="refused", due=1.0, sent=1.0, finished=1.0)])
    assert summary["ttft_ms"] is None
    assert summary["ms_per_token"] is None
    assert summary["request_throughput"] == 0


def test_summary_of_nothing():
    assert summarize([])["requests"] == 0


def test_percentiles():
    figures = distribution(list(range(101)))
    assert (figures["mean"], figures["p50"], figures["p90"], figures["p99"]) == (50, 50, 90, 99)
    assert distribution([]) is None


def test_back_to_back_requests_are_not_concurrent():
    assert concurrency([timeline(sent=0), timeline(sent=0.2 + 1e-9)], Window(0, 1)) == 1


def test_requests_count_as_in_flight_within_the_window_only():
    """Two before it, one that runs into it, one inside, two after it."""
    long = timeline(sent=0, first=2.0, gaps=(2.0,))
    sent = [timeline(sent=at) for at in (0.0, 0.1, 3.0, 7.0, 7.1)]
    assert summarize([long, *sent], None, Window(2.0, 5.0))["max_concurrency_seen"] == 2


def test_slo_items():
    assert parse_slo(["ttft:500", "tpot:49.5"]) == {"ttft": 500, "tpot": 49.5}


@pytest.mark.parametrize("item", ["itl:5", "ttft", "ttft:fast", "ttft:-1", "ttft:nan"])
def test_wrong_slo_items(item):
    with pytest.raises(ValueError, match="goodput"):
        parse_slo([item])


def test_acceptance():
    assert acceptance(steps=10, drafted=40, accepted=15) == {"acceptance_length": 2.5, "acceptance_rate": 0.375}
    assert acceptance(10, 0, 0) == {}
    assert not math.isnan(acceptance(1, 1, 0)["acceptance_length"])
