"""Ctrl-C and SIGTERM in the command line programs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


@contextmanager
def interruptible(program: str, outcome: str) -> Iterator[None]:
    """End the process at Ctrl-C with status 130 and one line, `program: interrupted, outcome`, instead of a traceback.
    So does SIGTERM, whose usual action would leave half a file behind.

    Also a decorator, for a program's main function.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted, {outcome}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def noted_interrupts() -> Iterator[Event]:
    """Let Ctrl-C set an event instead of raising KeyboardInterrupt: what runs inside ends where it looks at it."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
