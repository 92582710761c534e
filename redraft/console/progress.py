"""Progress of a long command: a bar in a terminal, elsewhere a log line at least every LINE_S seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

T = TypeVar("T")
LINE_S = 15.0
"""Seconds between two lines of a log."""


class Progress:
    """Work done of a total, in steps or bytes. Rate and time left follow from what was done since it began, unless the
    work has a `deadline` (of `time.monotonic`), which one step may miss. Without a total only the note is shown."""

    def __init__(self, name: str, total: int, unit: str, note: str = ""):
        self.name, self.total, self.unit, self.note = name, total, unit, note
        self.deadline: float | None = None
        self.changed: Callable[[], None] = lambda: None
        self.begin(0)

    def begin(self, done: int) -> None:
        """The work itself begins, of which so much was done before."""
        self.done, self._begun_with, self._started = done, done, time.monotonic()

    def update(self, done: int, note: str | None = None) -> None:
        """Set how much is done, and what is under way."""
        self.done, self.note = done, self.note if note is None else note
        self.changed()

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        self.update(self.done + count)

    def line(self) -> str:
        """Done, total, rate and time left."""
        if not self.total:
            return f"{self.name}: {self.note or 'begins'}"
        now = time.monotonic()
        rate = (self.done - self._begun_with) / max(now - self._started, 1e-9)
        parts = [f"{self._amount(min(self.done, self.total))} of {self._amount(self.total, self.unit)}"]
        if self.deadline is not None:
            late = now > self.deadline
            parts += ["over its time" if late else f"at most {duration(self.deadline - now)} left"]
        elif rate > 0:
            parts += [f"{self._amount(rate) if rate >= 10 else f'{rate:.2g}'}/s"]
            parts += [f"about {duration((self.total - self.done) / rate)} left"]
        return f"{self.name}: {', '.join(parts)}" + (f" ({self.note})" if self.note else "")

    def summary(self) -> str:
        """What was done, and in what time."""
        elapsed = duration(time.monotonic() - self._started)
        return f"{self.name}: {self._amount(self.done - self._begun_with, self.unit)} in {elapsed}"

    def _amount(self, count: float, unit: str = "") -> str:
        return size(count) if self.unit == "bytes" else f"{count:,.0f} {unit}".rstrip()


@contextmanager
def progress(name: str, total: int, unit: str, note: str = "", console: Console | None = None) -> Iterator[Progress]:
    """Show the progress of what runs inside, on standard error unless a console is given. The note says what is under
    way before the work itself begins.
    """
    console = console or Console(stderr=True)
    result = Progress(name, total, unit, note)
    if console.is_terminal:
        with Bar(TextColumn("{task.description}"), BarColumn(), console=console) as bar:
            task = bar.add_task(result.line(), total=total)
            result.changed = lambda: bar.update(task, completed=result.done, description=result.line())
            yield result
        return
    write(console, result.line())
    with heartbeat(result.line, console):
        yield result
    write(console, result.summary())


def tracked(items: Sequence[T], name: str, unit: str, console: Console | None = None) -> Iterator[T]:
    """Yields the items, and shows how many are done with."""
    with progress(name, len(items), unit, console=console) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def heartbeat(line: Callable[[], str], console: Console) -> Iterator[None]:
    """Write a line every LINE_S seconds while what is inside runs: from a thread, so that one long call into a library
    cannot hold it up."""
    ended = Event()

    def beat() -> None:
        while not ended.wait(LINE_S):
            write(console, line())

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def step(name: str) -> Iterator[None]:
    """Show on standard error that a step is under way, in a log every LINE_S seconds, and how long it took."""
    console, begun = Console(stderr=True), time.monotonic()
    lines = heartbeat(lambda: f"  {name}: {duration(time.monotonic() - begun)} so far", console)
    with console.status(name) if console.is_terminal else lines:
        yield
    write(console, f"  {name}: {time.monotonic() - begun:.1f} s")


def write(console: Console, line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds in words, never fewer than none: 40 s, 12 min, 3 h 20 min."""
    seconds = max(round(seconds), 0)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in words: 600 kB, 36 MB, 1.3 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
