"""Choosing the next token from logits: processors, filters, and randomness keyed by output position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from redraft.request import SamplingConfig

_MASK32 = 0xFFFFFFFF
_BLOCK = 128
_ONES = np.ones(_BLOCK, np.float32)
_AHEAD = 64
_NUCLEUS_FLOORS = (1e-4, 1e-6, 0.0)

Words = TypeVar("Words", int, np.ndarray)
"""One, or uint64 [n]."""


def philox(key: Words, counter: Words) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10: four independent uniform 32-bit words from a 64-bit key and a 128-bit counter."""
    c0, c1, c2, c3 = (counter >> shift & _MASK32 for shift in (0, 32, 64, 96))
    k0, k1 = key & _MASK32, key >> 32 & _MASK32
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK32, (low >> 32) ^ c3 ^ k1, low & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def position_uniform(seed: int, position: int, draw: int = 0) -> float:
    """The uniform in [0, 1) of one output position, 53 bits; `draw` counts further ones of the same position."""
    high, low, _, _ = philox(seed, position | draw << 64)
    return ((high << 21) | (low >> 11)) * 2.0**-53


def position_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`position_uniform` of many seeds and positions at once: uint64 [n] each to float64 [n]."""
    high, low, _, _ = philox(seeds, positions)
    return ((high << 21) | (low >> 11)) * 2.0**-53


@dataclass
class Distribution:
    """What a token is drawn from: `weights` float [n] of the tokens `ids` int64 [n], ascending (None: of all), whose
    sum is `total`. No other token is drawn."""

    ids: np.ndarray | None
    weights: np.ndarray
    total: float

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Probabilities float64 [M] of tokens int [M]."""
        places, known = self._places(tokens)
        return np.where(known, self.weights[places], 0.0) / self.total

    def put(self, tokens: np.ndarray, probabilities: np.ndarray) -> None:
        """Replace the weights of tokens by multiples float64 [M] of the old total. Where rounding leaves no weight at
        all, the old ones stay."""
        places, known = self._places(tokens)
        places, old = places[known], self.weights[places[known]]
        self.weights[places] = probabilities[known] * self.total
        if not self.weights.any():
            self.weights[places] = old

    def _places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens stand in `weights`, and which are there."""
        if self.ids is None:
            return tokens, np.ones(len(tokens), bool)
        places = np.minimum(self.ids.searchsorted(tokens), len(self.ids) - 1)
        return places, self.ids[places] == tokens


_LAST = -1
"""Key of a word tree's leaves."""


def _word_tree(words: Iterable[Sequence[int]]) -> dict[int, Any]:
    """Words by their tokens from the last but one back to the first; there, at _LAST, are their last tokens. So what a
    text may not go on with is found in as many steps as its end has in common with a word."""
    tree: dict[int, Any] = {}
    for word in words:
        node = tree
        for token in reversed(word[:-1]):
            node = node.setdefault(token, {})
        node.setdefault(_LAST, []).append(word[-1])
    return tree


class Sampler:
    """One request's sampling: its configuration and the history that its processors and randomness depend on.

    Verification calls `choose` at a node, `accept` with the token that it keeps, and goes on at the child: the history
    is then always the visited node's own path. Penalties count prompt and output, as TensorRT-LLM's do by default.
    """

    def __init__(
        self,
        config: SamplingConfig,
        prompt: Sequence[int],
        end_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        seed: int = 0,
    ):
        """`seed` is used where the configuration has none; `bad_words` are token sequences never to complete."""
        self.greedy = config.greedy
        self.seed = config.seed if config.seed is not None else seed
        self.end_ids = frozenset(end_ids)
        self.position = 0
        self.inverse_temperature = np.float32(1.0 / config.divisor)
        self.top_k = config.top_k or 0
        self.top_p = 1.0 if config.top_p is None else config.top_p
        self._repetition = np.float32(config.repetition_penalty or 1.0)
        self._presence = np.float32(config.presence_penalty or 0.0)
        self._frequency = np.float32(config.frequency_penalty or 0.0)
        self._min_length = config.min_length or 0
        self._bad_words = _word_tree(bad_words)
        self._tail_length = max((len(word) - 1 for word in bad_words), default=0)
        self._tail = list(prompt[max(len(prompt) - self._tail_length, 0) :])
        self._penalized = bool(self._repetition != 1 or self._presence or self._frequency)
        self._scratch = np.empty(0, np.float32)
        self._uniforms: list[float] = []
        self._uniforms_from = 0
        self._counts: dict[int, int] = {}
        if self._penalized:
            for token in prompt:
                self._counts[token] = self._counts.get(token, 0) + 1

    @property
    def plain(self) -> bool:
        """Whether nothing but logits, filters and position says what is chosen, here and at all later positions."""
        short = self.position < self._min_length and self.end_ids
        return not (self._penalized or short or self._bad_words)

    def accept(self, token: int) -> None:
        """Append a token to the history and move on to the next output position."""
        self.position += 1
        if self._penalized:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._tail_length:
            self._tail.append(token)
            del self._tail[: -self._tail_length]

    def choose(self, logits: np.ndarray) -> int:
        """The next token, from the target's logits float32 [V] (left unchanged)."""
        logits = self.process(logits)
        if self.greedy:
            return int(logits.argmax())
        ids, weights = self._support(logits)
        index = _inverse_cdf(weights, self._uniform())
        return index if ids is None else int(ids[index])

    def draw(self, distribution: Distribution) -> int:
        """A token by the random number that `choose` takes at this position."""
        index = _inverse_cdf(distribution.weights, self._uniform())
        return index if distribution.ids is None else int(distribution.ids[index])

    def flip(self, chance: float, number: int) -> bool:
        """Whether what has this chance happens, by a further random number of this position, `number` from 1 on."""
        return position_uniform(self.seed, self.position, number) < chance

    def distribution(self, logits: np.ndarray) -> Distribution:
        """What `choose` draws from, valid until the next call; for verifiers that compare distributions."""
        logits = self.process(logits)
        if self.greedy:
            return Distribution(np.array([logits.argmax()]), np.ones(1, np.float32), 1.0)
        ids, weights = self._support(logits)
        return Distribution(ids, weights, _total(weights))

    def process(self, logits: np.ndarray) -> np.ndarray:
        """Logits after penalties, minimum length and bad words at the current history."""
        if self.plain:
            return logits
        logits = logits.copy()
        if self._penalized and self._counts:
            self._penalize(logits)
        if self.position < self._min_length:
            logits[[token for token in self.end_ids if token < len(logits)]] = -np.inf
        if self._bad_words:
            logits[[token for token in self._banned() if token < len(logits)]] = -np.inf
        return logits

    def _banned(self) -> list[int]:
        """The tokens that would complete a bad word."""
        node = self._bad_words
        banned = [*node.get(_LAST, ())]
        for token in reversed(self._tail):
            if token not in node:
                break
            node = node[token]
            banned += node.get(_LAST, ())
        return banned

    def _uniform(self) -> float:
        """This position's random number: made for many positions together, it costs a tenth."""
        place = self.position - self._uniforms_from
        if not 0 <= place < len(self._uniforms):
            positions = np.arange(self.position, self.position + _AHEAD, dtype=np.uint64)
            self._uniforms = position_uniforms(np.full(_AHEAD, self.seed, np.uint64), positions).tolist()
            self._uniforms_from, place = self.position, 0
        return self._uniforms[place]

    def _penalize(self, logits: np.ndarray) -> None:
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=len(self._counts))
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
        seen = logits[ids]
        if self._repetition != 1:
            seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        logits[ids] = seen - self._presence - self._frequency * counts

    def _support(self, logits: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Token ids in ascending order (None: all) that top-k and top-p keep, and their unnormalized weights, valid
        until the next call."""
        ids = None
        if 0 < self.top_k < len(logits):
            ids = _top_k_ids(logits, self.top_k)
            logits = logits[ids]
        if len(logits) > len(self._scratch):
            self._scratch = np.empty_like(logits)
        weights = np.subtract(logits, logits.max(), out=self._scratch[: len(logits)])
        if self.inverse_temperature != 1:
            weights *= self.inverse_temperature
        np.exp(weights, out=weights)
        if self.top_p < 1:
            kept, weights = _nucleus(weights, self.top_p)
            ids = kept if ids is None else ids[kept]
        return ids, weights


def log_probability(logits: np.ndarray, token: int) -> float:
    """Natural log of the target's own probability of `token`, before processors and filters; logits float32 [V]."""
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top).sum(dtype=np.float64)))


def _top_k_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, ascending; among equals the lowest ids."""
    return _largest(logits, np.partition(logits, len(logits) - k)[len(logits) - k], k)


def _nucleus(weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids, ascending, and weights of the fewest tokens that hold `top_p` of all; among equals the lowest ids.

    Mostly a few tokens do: only those above a floor are sorted, and the floor is lowered until they hold enough.
    """
    total = float(weights.sum())
    for floor in _NUCLEUS_FLOORS:
        ids = (weights >= np.float32(floor * total)).nonzero()[0]
        kept = weights[ids].astype(np.float64)
        descending = np.sort(kept)[::-1]
        mass = descending.cumsum()
        if len(ids) and mass[-1] >= top_p * total:
            break
    size = min(int(mass.searchsorted(top_p * total)) + 1, len(kept))
    best = _largest(kept, descending[size - 1], size)
    return ids[best], kept[best]


def _largest(values: np.ndarray, smallest: np.float32, size: int) -> np.ndarray:
    """Ids, ascending, of the `size` largest values, given the smallest of them; among equals the lowest ids."""
    ids = (values >= smallest).nonzero()[0]
    if len(ids) > size:
        equal = ids[values[ids] == smallest]
        ids = np.setdiff1d(ids, equal[size - len(ids) :], assume_unique=True)
    return ids


def _total(weights: np.ndarray) -> float:
    """The sum of weights float [n], in float64 over blocks that are summed as they are."""
    blocks = weights[: len(weights) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return float(blocks.dot(_ONES).sum(dtype=np.float64)) + float(weights[blocks.size :].sum(dtype=np.float64))


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    """Smallest index whose cumulative weight exceeds `uniform` of the total; never one of weight 0."""
    start, below = 0, 0.0
    if len(weights) > _BLOCK**2 // 8:
        blocks = weights[: len(weights) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
        ends = blocks.dot(_ONES).cumsum(dtype=np.float64)
        rest = weights[blocks.size :]
        goal = uniform * (ends.item(-1) + (float(rest.sum()) if len(rest) else 0.0))
        block = int(ends.searchsorted(goal, "right"))
        start, below = block * _BLOCK, ends.item(block - 1) if block else 0.0
        inside = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    else:
        inside = weights.cumsum(dtype=np.float64)
        goal = uniform * inside[-1]
    index = min(start + int(inside.searchsorted(goal - below, "right")), len(weights) - 1)
    while weights[index] == 0:
        index -= 1
    return index
