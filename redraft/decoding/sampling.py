"""Choosing the next token from logits: processors, filters, and a draw by the noise of the output position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from redraft.decoding.noise import coin
from redraft.plugins.operators.sampling.cpu import TokenDraws

if TYPE_CHECKING:
    from redraft.grammar.state import GrammarState
    from redraft.request import SamplingConfig


@dataclass
class Distribution:
    """What a token is drawn from: `weights` float32 [n] of the tokens `ids` int32 [n], ascending (None: of all), whose
    sum is `total`. No other token is drawn."""

    ids: np.ndarray | None
    weights: np.ndarray
    total: float

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Probabilities float64 [M] of tokens int [M]."""
        indices, present = self._places(tokens)
        return np.where(present, self.weights[indices].astype(np.float64), 0.0) / self.total

    def put(self, tokens: np.ndarray, probabilities: np.ndarray) -> None:
        """Replace the weights of tokens by multiples float64 [M] of the old total. Where rounding leaves no weight at
        all, the old ones stay."""
        indices, present = self._places(tokens)
        indices, old = indices[present], self.weights[indices[present]]
        self.weights[indices] = probabilities[present] * self.total
        if not self.weights.any():
            self.weights[indices] = old

    def _places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens stand in `weights`, and which are there."""
        if self.ids is None:
            return tokens, np.ones(len(tokens), bool)
        indices = np.minimum(self.ids.searchsorted(tokens), len(self.ids) - 1)
        return indices, self.ids[indices] == tokens


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
    Without `penalize_prompt` the prompt's tokens have a count of 0, to which only the repetition penalty applies.
    A grammar is a processor too, the last one: where the others leave none of its tokens, they give way. What is chosen
    after its end is not part of the text.
    """

    def __init__(
        self,
        config: SamplingConfig,
        prompt: Sequence[int],
        end_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        seed: int = 0,
        grammar: GrammarState | None = None,
    ):
        """`seed` is used where the configuration has none; `bad_words` are token sequences never to complete."""
        self.grammar = grammar
        self.greedy = config.greedy
        self.seed = config.seed if config.seed is not None else seed
        self.end_ids = frozenset(end_ids)
        self.position = 0
        self.inverse_temperature = np.float32(1.0 / config.divisor)
        self.top_k = config.top_k or 0
        self.top_p = config.top_p or 1.0
        self.margin = np.float32(config.divisor * math.log(config.min_p) if config.min_p else -math.inf)
        """What min-p adds to the largest logit to get the smallest that it keeps."""
        self._repetition = np.float32(config.repetition_penalty or 1.0)
        self._presence = np.float32(config.presence_penalty or 0.0)
        self._frequency = np.float32(config.frequency_penalty or 0.0)
        self._min_length = config.min_length or 0
        self._bad_words = _word_tree(bad_words)
        self._tail_length = max((len(word) - 1 for word in bad_words), default=0)
        self._tail = list(prompt[max(len(prompt) - self._tail_length, 0) :])
        biases = config.logit_bias or {}
        self._biased = np.fromiter(biases.keys(), np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalized = bool(self._repetition != 1 or self._presence or self._frequency)
        shortest = self._min_length if self.end_ids else 0
        self._plain_from = math.inf if self._penalized or biases or self._bad_words else shortest
        """The output position from which on it is `plain`."""
        self._counts: dict[int, int] = {}
        if self._penalized:
            for token in prompt:
                self._counts[token] = self._counts.get(token, 0) + config.penalize_prompt

    @property
    def plain(self) -> bool:
        """Whether nothing but logits, grammar, filters and position says what is chosen, here and at all later
        positions."""
        return self.position >= self._plain_from

    @property
    def filters(self) -> bool:
        """Whether `draws` need other logits than the target's: those of min-p."""
        return not self.greedy and bool(self.margin > -math.inf)

    def accept(self, token: int) -> None:
        """Append a token to the history and move on to the next output position."""
        self.position += 1
        if self.grammar is not None:
            self.grammar.advance(token)
        if self._penalized:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._tail_length:
            self._tail.append(token)
            del self._tail[: -self._tail_length]

    def skip(self, count: int) -> None:
        """Move on by `count` tokens of which only the position tells: those of a plain sampler without a grammar."""
        self.position += count

    @cached_property
    def draws(self) -> TokenDraws:
        """What draws its tokens from likely logits."""
        return TokenDraws(self.seed, float(self.inverse_temperature), self.top_k, self.top_p)

    def choose(self, logits: np.ndarray) -> int:
        """The next token, from the target's logits float32 [V] (left unchanged)."""
        logits = self.process(logits)
        if self.greedy:
            return int(logits.argmax())
        return self.draws.choose(self._likely(logits), self.position)

    def draw(self, distribution: Distribution) -> int:
        """A token by the noise that `choose` takes at this position."""
        ids = None if distribution.ids is None else np.ascontiguousarray(distribution.ids, np.int32)
        return self.draws.race(ids, np.ascontiguousarray(distribution.weights, np.float32), self.position)

    def flip(self, chance: float, number: int) -> bool:
        """Whether what has this chance happens, by a coin of this position, which shares nothing with its noise;
        `number` counts a position's coins."""
        return coin(self.seed, self.position, number) < chance

    def distribution(self, logits: np.ndarray) -> Distribution:
        """What `choose` draws from, valid until the next call; for verifiers that compare distributions."""
        logits = self.process(logits)
        if self.greedy:
            return Distribution(np.array([logits.argmax()], np.int32), np.ones(1, np.float32), 1.0)
        return Distribution(*self.draws.distribution(self._likely(logits)))

    def _likely(self, logits: np.ndarray) -> np.ndarray:
        """Processed logits float32 [V] after min-p."""
        logits = np.ascontiguousarray(logits, np.float32)
        if self.margin == -math.inf:
            return logits
        return np.where(logits < logits.max() + self.margin, np.float32(-math.inf), logits)

    def process(self, logits: np.ndarray) -> np.ndarray:
        """Logits after biases, penalties, minimum length, bad words and grammar at the current history."""
        if self.plain and self.grammar is None:
            return logits
        raw, logits = logits, logits.copy()
        logits[self._biased] += self._biases
        if self._penalized and self._counts:
            self._penalize(logits)
        if self.position < self._min_length:
            logits[[token for token in self.end_ids if token < len(logits)]] = -np.inf
        if self._bad_words:
            logits[[token for token in self._banned() if token < len(logits)]] = -np.inf
        if self.grammar is not None and not self.grammar.ended:
            allowed = self.grammar.mask()
            np.copyto(logits, -np.inf, where=~allowed)
            if logits.max() == -np.inf:
                return np.where(allowed, raw, np.float32(-np.inf))
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

    def _penalize(self, logits: np.ndarray) -> None:
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=len(self._counts))
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
        seen = logits[ids]
        if self._repetition != 1:
            seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        logits[ids] = seen - self._presence * (counts > 0) - self._frequency * counts
