"""Drafting without a model from all that a service has served: what followed the same tokens in other requests' texts.

Texts lie in a ring, one after the other, so that the oldest are forgotten first, token by token. Three tables say where
the newest token stands that followed the same one, three or eight tokens; from there a look-up goes back over a few
older places, and compares. So a token takes about 50 bytes, a look-up a few reads, and matches may be long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from redraft.decoding.defaults import TEXT_CHANCES

LONGEST = max(TEXT_CHANCES)
"""The most tokens that are compared."""
STARTS = 1, 3, 8
"""Lengths of matches that are looked up, the longest first."""
JOINED = 3
"""The least match that counts beside a drafter, which knows better what follows one token or two."""
TRIES = 8
"""Places that a look-up compares, the newest ones."""
MOST_SEEN = 1024
"""Guesses of one kind after which their counts are halved."""
WEIGHT = 16.0
"""Guesses that a first chance counts as."""
WORD = 2**64 - 1


class TextMatch(NamedTuple):
    """What followed the end of a text elsewhere."""

    token: int
    length: int
    """Tokens that are the same, at most LONGEST."""
    times: int
    """How often in a row the token followed what matched best, 4: or more."""


class TextStore:
    """Texts that were served, the newest `capacity` tokens, each text in a scope: what is drafted for one scope comes
    from its own texts only.

    It learns how often its guesses are right, by the length of the match and by the times that the token followed.
    """

    def __init__(self, capacity: int, seed: int, chances: Mapping[int, Sequence[float]] = TEXT_CHANCES):
        """`capacity`: more than LONGEST. `seed`: 64 bits that no client knows, so that nobody can write texts which all
        belong in one place. `chances`: see `TEXT_CHANCES`."""
        self.capacity, self.seed, self.chances = capacity, seed, chances
        self._tokens, self._scopes, self._times = ([fill] * capacity for fill in (-1, 0, 0))
        self._newest: dict[int, dict[int, int]] = {start: {} for start in STARTS}
        self._before = {start: [-1] * capacity for start in STARTS}
        self._seen = {length: [0] * len(by_times) for length, by_times in chances.items()}
        self._right = {length: [0] * len(by_times) for length, by_times in chances.items()}
        self._scope = self._next = self._length = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens that are stored, guesses that were learned from since the start, and how many of these were right."""
        return sum(token >= 0 for token in self._tokens), *self._learned

    _learned = 0, 0

    def add(self, scope: int, tokens: Iterable[int]) -> None:
        """Store a text."""
        self.begin(scope)
        self.extend(tokens)

    def begin(self, scope: int) -> None:
        """Begin a text of a scope, 64 bits."""
        self._scope = scope
        if self._length:
            self._put(-1, 0)
        self._length = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            backs = range(min(self._length, LONGEST), 0, -1)
            tail = tuple(self._tokens[self._next - back] for back in backs)
            match = self.match(self._scope, tail)
            times = min(match.times + 1, len(self.chances[LONGEST])) if match and match.token == token else 1
            for start in STARTS:
                if len(tail) >= start:
                    place = self._place(start, self._scope, tail)
                    newest = self._newest[start].get(place, -1)
                    self._before[start][self._next] = -1 if newest == self._next else newest
                    self._newest[start][place] = self._next
            self._put(token, times)
            self._length += 1

    def _put(self, token: int, times: int) -> None:
        """Overwrite the oldest place, and mark the next one as the end of what is stored."""
        self._tokens[self._next], self._scopes[self._next], self._times[self._next] = token, self._scope, times
        self._next = (self._next + 1) % self.capacity
        self._tokens[self._next] = -1

    def match(self, scope: int, tail: tuple[int, ...], least: int = 1) -> TextMatch | None:
        """What followed the longest end of `tail`, of `least` tokens or more (one of STARTS), that is found among the
        newest places, of equal ones the newest."""
        tail = tail[-LONGEST:]
        for start in reversed(STARTS):
            if len(tail) < start or start < least:
                continue
            best = None
            place = self._newest[start].get(self._place(start, scope, tail), -1)
            for _ in range(TRIES):
                if place < 0:
                    break
                # The place may have been taken by another text, or its end.
                if self._tokens[place] >= 0 and self._scopes[place] == scope:
                    length = self._common(place, tail)
                    if length >= start and length > (best.length if best else 0):
                        best = TextMatch(self._tokens[place], length, self._times[place])
                    if length == len(tail):
                        break
                place = self._before[start][place]
            if best:
                return best
        return None

    def _place(self, start: int, scope: int, tail: tuple[int, ...]) -> int:
        """Where a table has the newest place."""
        number = mixed(self.seed ^ scope)
        for token in reversed(tail[-start:]):
            number = mixed(number ^ token)
        return number & ((1 << (self.capacity - 1).bit_length()) - 1)

    def _common(self, place: int, tail: tuple[int, ...]) -> int:
        """How many tokens before a place are the end of `tail`."""
        length = 0
        while length < len(tail) and self._tokens[place - length - 1] == tail[-1 - length]:
            length += 1
        return length

    def guess(self, scope: int, tail: tuple[int, ...], least: int = 1) -> tuple[int, float] | None:
        """The token that may follow `tail`, and the chance that it does; `least` as of `match`."""
        match = self.match(scope, tail, least)
        return (match.token, self.chance(match)) if match else None

    def chance(self, match: TextMatch) -> float:
        """How often a guess is right that matches so: what was seen, and WEIGHT guesses of `chances`."""
        length, index = self._cell(match)
        seen, right = self._seen[length][index], self._right[length][index]
        return (right + WEIGHT * self.chances[length][index]) / (seen + WEIGHT)

    def learn(self, match: TextMatch, token: int) -> None:
        """Count a guess, after which a token came."""
        length, index = self._cell(match)
        right = match.token == token
        self._learned = self._learned[0] + 1, self._learned[1] + right
        self._right[length][index] += right
        self._seen[length][index] += 1
        if self._seen[length][index] == MOST_SEEN:
            self._seen[length][index] //= 2
            self._right[length][index] //= 2

    def _cell(self, match: TextMatch) -> tuple[int, int]:
        return max(length for length in self.chances if length <= match.length), match.times - 1


def mixed(number: int) -> int:
    """Another number for each number of 64 bits: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)
