"""Which answers of a service are stored for drafters to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re2


@dataclass(frozen=True)
class Policy:
    """Where answers are stored, which, and for how long."""

    folder: Path
    share: float = 1.0
    """Of the answers, chosen at random, 0 to 1"""
    gigabytes: float = 2.0
    """The folder's size, beyond which the oldest shards go"""
    days: float = 30.0
    """The age at which a shard goes"""
    redacted: tuple[re2._Regexp, ...] = ()
    """An answer is not stored if one of these is found in its text or in its prompt's"""


def pattern(text: str) -> re2._Regexp:
    """A regular expression of RE2, which any text is searched for in time linear in its length: one of Python's could
    hold the worker up for minutes. Raises ValueError."""
    import re2  # 30 ms, where one is given

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        raise ValueError(f"{text!r}: {error.args[0].decode()}: expected a regular expression of RE2") from None
