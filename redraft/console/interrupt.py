"""Ctrl-C in the command line programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(program: str, outcome: str) -> Iterator[None]:
    """End the process at Ctrl-C with status 130 and one line, `program: interrupted, outcome`, instead of a traceback.

    Also a decorator, for a program's main function.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted, {outcome}", file=sys.stderr)
        raise SystemExit(130) from None
