"""The fit of node scores: the numbers that make a score the chance to be accepted.

The chances of n-gram guesses are counted in greedy answers. At each temperature their odds have a factor of their own;
and a drafter's candidates have the scores softmax(beta (slope log p + g)), which are chances only for the right slope
and the right sharpness, of which beta is made. All of them, and the factors by which guesses and the drafter's scores
are joined, are fitted to answers that were drafted for, by the least log loss over what was drafted and what came.

The noise of an n-gram guess is known too, but says next to nothing: what is in doubt is whether the text repeats
itself, more than what is drawn, and a drafter's score of the same token has that noise already.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.decoding.defaults import NGRAM_CHANCES
from redraft.decoding.draws import log_softmax
from redraft.decoding.growth import MOST, joint_odds
from redraft.decoding.ngram import MOST_TIMES, NgramIndex, with_odds
from redraft.decoding.noise import race
from redraft.decoding.scores import Scores
from redraft.decoding.text_store import LONGEST
from redraft.engines.api import DraftEngine, DrawingEngine, Engine, EngineAround, ResamplingEngine

SLOPES = np.arange(0.5, 1.71, 0.05)
SHARPNESSES = np.arange(0.3, 4.01, 0.02)
FACTORS = np.geomspace(0.1, 4, 61)
"""Values that are tried."""
Chances: TypeAlias = Mapping[int, Sequence[float]]
"""See `NgramScores`"""
LEAST_FITTED = 64
"""Fewer records than this fit nothing: the defaults stay."""
DEFAULTS_COUNT = 32
"""Guesses that a default chance counts for beside those that were seen: short answers repeat themselves seldom. Source:
set by hand."""
JOINT_FACTORS = tuple(itertools.product(np.geomspace(1 / 8, 2, 17), np.geomspace(1 / 4, 16, 19)))
"""Pairs of factors that are tried: see `growth.joint_odds`."""


class Drafted(NamedTuple):
    """What was drafted for a sequence at an output position: its part of `DraftCandidates`."""

    candidates: np.ndarray  # int32 [L, W, K]
    log_probs: np.ndarray  # float32 [L, W, K]
    parents: np.ndarray  # int32 [L, W]


class Visited(NamedTuple):
    """A drafted node that the answer went through, by its candidates."""

    level: int
    came: int
    """The token after it."""
    tokens: np.ndarray  # int32 [K]
    scores: np.ndarray  # float64 [K], of each candidate below this node

    @property
    def accepted(self) -> np.ndarray:
        """Which candidate came: bool [K]."""
        return (self.tokens == self.came) & np.isfinite(self.scores)

    def noise(self, seed: int, position: int) -> np.ndarray:
        """The candidates' noise g, float64 [K], of a draft for a sequence of this seed from this output position on."""
        return -np.log(race(seed, position + self.level, self.tokens).astype(np.float64))


class Guess(NamedTuple):
    """An n-gram guess at a node that the answer went through."""

    prior: float
    """Its chance in greedy answers."""
    neural: float | None
    """The drafter's score of the token, as a chance; None where it has no candidates."""
    came: bool


@dataclass
class DraftLog:
    """What was drafted for sampled sequences, by seed and output position."""

    drafts: dict[int, dict[int, Drafted]] = field(default_factory=dict)

    def add(self, drafts: DraftCandidates, noise: SharedNoise | None) -> DraftCandidates:
        """Keep drafts, which are returned as they are."""
        if noise is not None:
            for b in np.flatnonzero(noise.temperature):
                parts = drafts.candidates[b], drafts.log_probs[b], drafts.parents[b]
                by_position = self.drafts.setdefault(int(noise.seeds[b]), {})
                by_position[int(noise.positions[b])] = Drafted(*(part.copy() for part in parts))
        return drafts


class LoggedEngine(EngineAround):
    """An engine whose drafts are kept in a log."""

    def __init__(self, engine: Engine, log: DraftLog):
        super().__init__(engine)
        self._drafters = {name: LoggedDrafter(drafter, log) for name, drafter in engine.drafters.items()}

    @property
    def drafters(self) -> Mapping[str, DraftEngine]:
        """Those of the engine, which keep their drafts."""
        return self._drafters


class LoggedDrafter:
    """A drafter whose drafts are kept in a log. It draws and re-samples if the drafter does, without a log."""

    def __init__(self, drafter: DraftEngine, log: DraftLog):
        self._drafter, self._log = drafter, log
        self.reads_context, self.reads_text = drafter.reads_context, drafter.reads_text
        if isinstance(drafter, ResamplingEngine):
            self.resample = drafter.resample
        if isinstance(drafter, DrawingEngine):
            self.draw = drafter.draw

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """See `DraftEngine.draft`."""
        return self._log.add(self._drafter.draft(batch, noise), noise)


def visited(drafted: Drafted, text: Sequence[int]) -> Iterator[Visited]:
    """The drafted nodes that a text goes through, from the root on."""
    beam, above = 0, 0.0
    for level, came in enumerate(text[: len(drafted.candidates)]):
        tokens, logs = drafted.candidates[level, beam], drafted.log_probs[level, beam]
        node = Visited(level, came, tokens, logs.astype(np.float64) - above)
        yield node
        accepted = np.flatnonzero(node.accepted)
        if not len(accepted) or level + 1 == len(drafted.candidates):
            return
        below = np.flatnonzero(drafted.parents[level + 1] == beam * len(tokens) + accepted[0])
        if not len(below):
            return
        beam, above = int(below[0]), float(logs[accepted[0]])


def matches(prompt: Sequence[int], answer: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """The n-gram guesses at all output positions of an answer: tokens that matched, how often in a row the guess came
    after them, and whether it came now."""
    index = NgramIndex(prompt)
    for came in answer:
        if match := index.match(index.tail):
            yield match[1], match[2], match[0] == came
        index.extend([came])


def fit_chances(seen: Iterable[tuple[int, int, bool]]) -> Chances:
    """The chances of n-gram guesses, from what `matches` saw in greedy answers. A default counts as DEFAULTS_COUNT
    guesses."""
    counts: Counter[tuple[int, int]] = Counter()
    right: Counter[tuple[int, int]] = Counter()
    for length, times, came in seen:
        counts[length, times] += 1
        right[length, times] += came

    def chance(length: int, times: int) -> float:
        known = DEFAULTS_COUNT * NGRAM_CHANCES[length][times - 1]
        rate = (right[length, times] + known) / (counts[length, times] + DEFAULTS_COUNT)
        return round(min(max(rate, 0.001), 0.999), 3)  # nothing is certain: odds stay finite

    return {length: tuple(chance(length, times) for times in range(1, MOST_TIMES + 1)) for length in NGRAM_CHANCES}


def guesses(
    prompt: Sequence[int], answer: Sequence[int], drafts: Mapping[int, Drafted], chances: Chances
) -> Iterator[Guess]:
    """The n-gram guesses at the output positions of an answer that have `drafts`, beside them; without any, at all."""
    index = NgramIndex(prompt, chances=chances)
    for position in range(len(answer)):
        if position:
            index.extend(answer[position - 1 : position])
        if drafts and position not in drafts:
            continue
        nodes = list(visited(drafts[position], answer[position:])) if drafts else []
        tail = index.tail
        for level, came in enumerate(answer[position : position + max(len(nodes), 1)]):
            if seen := index.seen(tail):
                neural = _chance(nodes[level], seen[0]) if level < len(nodes) else None
                yield Guess(seen[1], neural, seen[0] == came)
            tail = (*tail, came)[-LONGEST:]


def _chance(node: Visited, token: int) -> float:
    """The drafter's chance of a token, 0 where it is not among the candidates."""
    matches = np.flatnonzero(node.tokens == token)
    return float(np.exp(node.scores[matches[0]])) if len(matches) else 0.0


def fit_slope(nodes: Iterable[tuple[Visited, np.ndarray]], before: Scores, temperature: float) -> float | None:
    """The slope of the least log loss of what came among a node's candidates, from nodes that were scored with other
    numbers, `before`, and their candidates' noise: see `Scores`. None: there are too few nodes.

    Every slope is judged with the sharpness that suits it best. Where another token came, a node says nothing: the
    chances of the candidates among themselves do not depend on the other tokens.
    """
    samples = [(node.scores, noise, np.flatnonzero(node.accepted)[0]) for node, noise in nodes if node.accepted.any()]
    if len(samples) < LEAST_FITTED:
        return None
    scores, g, came = map(np.stack, zip(*samples, strict=True))
    log_p = (scores / before.beta(temperature) - g) / before.slope
    losses = {}
    for slope, sharpness in itertools.product(SLOPES, SHARPNESSES[::3]):
        logs = log_softmax(sharpness * temperature * (slope * log_p + g))
        losses[slope, sharpness] = -logs[np.arange(len(came)), came].mean()
    return round(float(min(losses, key=losses.__getitem__)[0]), 2)


def fit_sharpness(nodes: Iterable[Visited], sharpness: float, support: int) -> float | None:
    """The sharpness of the least log loss of the candidates of nodes that were scored with another one, `sharpness`:
    see `Scores.beta`, whose temperature cancels out.

    The tokens of a node's `support` that are no candidates are taken for equally likely; the further the result is
    from `sharpness`, the more that matters. None: there are too few nodes.
    """
    samples = list(nodes)
    if len(samples) < LEAST_FITTED:
        return None
    scores = np.stack([node.scores for node in samples]) / sharpness
    accepted = np.stack([node.accepted for node in samples])
    others = support - scores.shape[1]
    if others > 0:
        left = np.maximum(1 - np.exp(scores * sharpness).sum(1), 1e-9) / others
        rest = np.log(others), np.log(left) / sharpness
    losses = []
    for tried in SHARPNESSES:
        logs = tried * scores
        total = np.logaddexp.reduce(logs, axis=1)
        if others > 0:
            total = np.logaddexp(total, rest[0] + tried * rest[1])
        losses.append(log_loss(np.exp(logs - total[:, None]), accepted))
    return round(float(SHARPNESSES[np.argmin(losses)]), 2)


def fit_ngram_odds(guesses_seen: Iterable[Guess], joint: tuple[float, float]) -> float | None:
    """The factor of the odds of n-gram guesses that has the least log loss, where they are joined with the drafter's
    scores. None: there are too few."""
    samples = list(guesses_seen)
    if len(samples) < LEAST_FITTED:
        return None
    came = np.array([guess.came for guess in samples])
    losses = []
    for factor in FACTORS:
        losses.append(log_loss(np.array([joint_chance(guess, factor, joint) for guess in samples]), came))
    return round(float(FACTORS[np.argmin(losses)]), 3)


def fit_joint_odds(guesses_seen: Iterable[tuple[Guess, float]]) -> tuple[float, float] | None:
    """The factors of `growth.joint_odds` of the least log loss of guesses beside a drafter's candidates, each with the
    factor of its odds. None: there are too few."""
    samples = [(guess, factor) for guess, factor in guesses_seen if guess.neural is not None]
    if len(samples) < LEAST_FITTED:
        return None
    came = np.array([guess.came for guess, _ in samples])
    losses = {
        joint: log_loss(np.array([joint_chance(guess, factor, joint) for guess, factor in samples]), came)
        for joint in JOINT_FACTORS
    }
    ngram_factor, joint_factor = min(losses, key=losses.__getitem__)
    return round(float(ngram_factor), 3), round(float(joint_factor), 3)


def joint_chance(guess: Guess, factor: float, joint: tuple[float, float]) -> float:
    """A guess's chance, as `grow_trees` scores it."""
    chance = with_odds(guess.prior, factor)
    if guess.neural is None:
        return chance
    odds = joint_odds(chance, min(guess.neural, MOST), joint)
    return odds / (1 + odds)


def log_loss(chances: np.ndarray, accepted: np.ndarray) -> float:
    """Mean log loss of chances of what was accepted or not."""
    chances = np.clip(chances, 1e-6, 1 - 1e-6)
    return float(-np.log(np.where(accepted, chances, 1 - chances)).mean())
