"""What is recorded of an answer while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

from redraft.engines.features import Features

MOST_TOKENS = 4096
"""Tokens of an answer that are recorded; a longer one's first."""


@dataclass
class Recording:
    """An answer's tokens, an end token among them, and the target's features of all but the last."""

    tokens: list[int] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    """[n, F] each; they share memory with other sequences of the same step"""

    def add(self, features: Features, tokens: list[int]) -> None:
        """Take the tokens of a step, and the features [n, F] of the n tokens from the root that they follow."""
        if len(self.tokens) < MOST_TOKENS:
            self.features.append(features)
            self.tokens += tokens
