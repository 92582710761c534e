"""The pairs of features and tokens that a drafter with a context reads, until it has read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from redraft.engines.features import Features, join

MOST_PARTS = 32
"""Most arrays of features kept apart; each may share memory with other sequences of the same step."""


@dataclass
class Pairs:
    """A sequence's pairs, each the features of a token and the token after it, that its drafter has not ingested yet,
    and how many it has. With `from_text` they begin with the text's first token, after features of any value. The first
    `skipped` rows of the target have none; with `whole` none may be skipped, since drafts decide the answer."""

    from_text: bool = False
    ingested: int = 0
    features: list[Features] = field(default_factory=list)
    """[n, H] each"""
    tokens: list[int] = field(default_factory=list)
    """The token after a prompt's last one is added when it is chosen."""
    skipped: int = 0
    whole: bool = False

    def add(self, features: Features, tokens: list[int]) -> None:
        """Keep features [n, F], which nobody writes to, and the tokens that follow."""
        self.features.append(features)
        self.tokens += tokens
        if len(self.features) > MOST_PARTS:
            self.features = [join(self.features)]

    @property
    def rows(self) -> int:
        """Rows of the target, from the first, whose pairs are all known or skipped."""
        return self.skipped + self.ingested + len(self.tokens) - self.from_text

    def first(self, rows: int) -> Pairs:
        """The pairs of the target's first rows, as far as they are known; features are shared."""
        if rows < self.skipped:
            return Pairs(skipped=rows)
        count = rows - self.skipped + self.from_text
        left = min(max(count - self.ingested, 0), len(self.tokens))
        cut = Pairs(self.from_text, min(self.ingested, count), [], self.tokens[:left], self.skipped)
        for part in self.features:
            cut.features += [part[:left]] if left > 0 else []
            left -= len(part)
        return cut

    def take(self) -> tuple[list[Features], list[int]]:
        """What is to be ingested now; it is forgotten here."""
        taken = self.features, self.tokens
        self.ingested += len(self.tokens)
        self.features, self.tokens = [], []
        return taken
