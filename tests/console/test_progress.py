"""Progress in a log: a line at least every LINE_S, done and total, and a time left that is never negative."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from redraft.console import progress
from tests.conftest import wait_until


def shown_lines(monkeypatch, work: Callable[[progress.Progress], None], said: str = "", times: int = 0) -> list[str]:
    """The log of work, which goes on until the log says so, so many times."""
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    text = io.StringIO()
    with progress.progress("distill", 20_000, "tokens", "loading", Console(file=text)) as shown:
        work(shown)
        wait_until(lambda: text.getvalue().count(said) >= times)
    return text.getvalue().splitlines()


def test_a_log_gets_lines_while_a_library_computes(monkeypatch):
    """Without an update between them."""
    *lines, last = shown_lines(monkeypatch, lambda shown: None, "loading", 3)
    assert set(lines) == {"distill: 0 of 20,000 tokens (loading)"}
    assert re.fullmatch(r"distill: 0 tokens in \d+ s", last)


def test_a_line_says_done_total_rate_and_time_left(monkeypatch):
    def work(shown: progress.Progress) -> None:
        shown.begin(2_400)
        shown.update(12_400, "step 7")

    *lines, last = shown_lines(monkeypatch, work, "step 7", 2)
    pattern = r"distill: 12,400 of 20,000 tokens, [\d,]+/s, about \d+ s left \(step 7\)"
    assert all(re.fullmatch(pattern, line) for line in lines if "step 7" in line), lines
    assert last.startswith("distill: 10,000 tokens in ")


def test_bytes_are_shown_as_sizes():
    shown = progress.Progress("fetch", 1_260_000_000, "bytes")
    shown.update(36_000_000)
    assert re.fullmatch(r"fetch: 36 MB of 1\.3 GB, .*B/s, about .* left", shown.line())
    assert shown.summary().startswith("fetch: 36 MB in ")


def test_a_deadline_replaces_the_estimate():
    shown = progress.Progress("tune", 0, "measurements", "serving prompts")
    assert shown.line() == "tune: serving prompts"
    shown.total, shown.deadline = 40, time.monotonic() + 120
    shown.update(1, "step times")
    assert shown.line() == "tune: 1 of 40 measurements, at most 2 min left (step times)"
    shown.deadline = time.monotonic() - 1
    assert shown.line() == "tune: 1 of 40 measurements, over its time (step times)"


def test_more_than_the_total_leaves_no_time(monkeypatch):
    lines = shown_lines(monkeypatch, lambda shown: shown.update(20_300, ""), " 20,000 of 20,000 tokens, ", 2)
    assert all(line.endswith("about 0 s left") for line in lines if " of 20,000 tokens, " in line), lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-200, "0 s"), (59.6, "60 s"), (120, "2 min"), (5_900, "98 min"), (6_000, "1 h 40 min"), (86_400, "24 h 0 min")],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert progress.duration(seconds) == text


def test_a_terminal_gets_a_bar():
    text = io.StringIO()
    with progress.progress("tune", 10, "rows", console=Console(file=text, force_terminal=True, width=120)) as shown:
        shown.update(10)
    assert "tune: 10 of 10 rows" in text.getvalue()


def test_a_long_step_says_that_it_goes_on_and_how_long_it_took(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    with progress.step("compile"):
        wait_until(lambda: re.search(r"compile: \d+ s so far", capsys.readouterr().err) is not None)
    assert re.search(r"compile: \d+\.\d s\n", capsys.readouterr().err)


def test_every_item_is_counted():
    """And short work is seen too: many stages in turn leave no long silence."""
    text = io.StringIO()
    assert list(progress.tracked("abc", "judge", "letters", Console(file=text))) == ["a", "b", "c"]
    first, last = text.getvalue().splitlines()
    assert first == "judge: 0 of 3 letters"
    assert re.fullmatch(r"judge: 3 letters in \d+ s", last)
