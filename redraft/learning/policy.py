"""Which answers of a service are stored for drafters to learn from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


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
    redacted: tuple[re.Pattern[str], ...] = ()
    """An answer is not stored if one of these is found in its text or in its prompt's"""
