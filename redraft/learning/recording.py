"""What is recorded of an answer while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redraft.engines.features import Features, join, on_host
from redraft.learning.shard_file import bfloat16_bits

MOST_TOKENS = 4096
"""Tokens of an answer that are recorded; a longer one's first."""
STEPS_ON_DEVICE = 64
"""Steps whose features stay as the engine has them, until they go to the host together and are rounded."""


@dataclass
class Recording:
    """An answer's tokens, an end token among them, and the target's features of all but the last."""

    width: int
    """Columns of the features that are kept, the first ones"""
    tokens: list[int] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)
    """Bits of bfloat16 uint16 [n, width] each"""
    _last: list[Features] = field(default_factory=list)
    """Those that may be on a device"""

    def add(self, features: Features, tokens: list[int]) -> None:
        """Take the tokens of a step, and the features [n, F] of the n tokens from the root that they follow."""
        if len(self.tokens) < MOST_TOKENS:
            # a copy: a slice would keep those of all sequences of the step
            self._last.append(join([features[:, : self.width]]))
            self.tokens += tokens
            if len(self._last) == STEPS_ON_DEVICE:
                self._to_host()

    def bits(self) -> np.ndarray:
        """The features of all tokens but the last, bits of bfloat16 uint16 [n, width]. This waits for a device."""
        self._to_host()
        return np.concatenate(self.features)

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return sum(int(part.nbytes) for part in (*self.features, *self._last))

    def _to_host(self) -> None:
        if self._last:
            self.features.append(bfloat16_bits(on_host(join(self._last))))
            self._last = []
