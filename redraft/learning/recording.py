"""What is recorded of an answer while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redraft.engines.features import Features, join, on_host

MOST_TOKENS = 4096
"""Tokens of an answer that are recorded; a longer one's first."""
STEPS_ON_DEVICE = 64
"""Steps whose features stay where the engine keeps them, until they go to the host together."""


@dataclass
class Recording:
    """An answer's tokens, an end token among them, and the target's features of all but the last."""

    tokens: list[int] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    """[n, F] each"""
    _last: list[Features] = field(default_factory=list)
    """Those that may be on a device"""

    def add(self, features: Features, tokens: list[int]) -> None:
        """Take the tokens of a step, and the features [n, F] of the n tokens from the root that they follow."""
        if len(self.tokens) < MOST_TOKENS:
            self._last.append(join([features]))  # a copy: a slice would keep those of all sequences of the step
            self.tokens += tokens
            if len(self._last) == STEPS_ON_DEVICE:
                self._to_host()

    def on_host(self) -> np.ndarray:
        """The features of all tokens but the last, float32 [n, F]. This waits for a device."""
        self._to_host()
        return on_host(join(self.features))

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return sum(int(part.nbytes) for part in (*self.features, *self._last))

    def _to_host(self) -> None:
        if self._last:
            self.features.append(on_host(join(self._last)))
            self._last = []
