"""One request while it is served: its tokens, its place in the KV cache, its text, its statistics."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from redraft.decoding.log_probs import LogProbs
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.origins import Proposals
from redraft.decoding.retrieval import RetrievalText
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import Node
from redraft.decoding.verification import Verdict
from redraft.engines.features import Features, join
from redraft.request import DraftTree, FinishReason, Generated, GenerateRequest, SequenceStats, StopReason
from redraft.text import TextCodec, TextStream

if TYPE_CHECKING:
    from redraft.grammar.state import Grammar

MOST_PARTS = 32
"""Most arrays of features kept apart; each may share memory with other sequences of the same step."""


@dataclass
class Output(Generated):
    """What one request gained since its last output."""

    key: Hashable = field(kw_only=True)
    prompt_tokens: int = 0
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was drafted and accepted, rather than chosen after the draft's last accepted one."""
    error: str | None = None
    """Why the request failed, where the finish reason is `error`."""


@dataclass(frozen=True)
class Gain:
    """What one step of one sequence added to the counts of the same names in `SequenceStats`, and to the metrics."""

    output_tokens: int
    drafted: int
    accepted: int
    reused: int
    rows_executed: int


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


class Sequence:
    """A request's state. The cache holds its first `cache_length` tokens once the rows `commit` have been moved.

    `root` is the last certain token, whose row is not in the cache yet. For its drafter it keeps `features` [1, F] of
    the token before the root, or the `pairs` that a drafter with a context ingests.

    `memory` is what its method drafts from beside the drafter, and is told every token of; None: nothing.
    `generated` are the tokens taken so far, an end token included.
    `reusable` is how many tokens of the prompt a slot would have in place, while it waits for one; `reusable_in` the
    state of the slots in which that was counted.
    `gained_at` is when it last gained tokens, as `time.perf_counter` tells it.
    `proposals` say what proposed the next tree's nodes; None unless the request wants its trees.
    """

    def __init__(
        self,
        key: Hashable,
        request: GenerateRequest,
        prompt: list[int],
        codec: TextCodec,
        end_ids: frozenset[int],
        seed: int = 0,
        stream_interval_s: float = 0.0,
        arrived: float | None = None,
        grammar: Grammar | None = None,
    ):
        """`end_ids` are the model's own end tokens, used unless the request names another; `seed` likewise. `arrived`
        is when the request came, as `time.perf_counter` tells it; now by default. `grammar` is the request's guide.

        A stream's text is given out at most every `stream_interval_s` seconds.
        """
        special = {word: codec.special_id(word) for word in request.stop_words}
        if request.end_id is not None and request.end_id not in end_ids:
            end_ids = frozenset({request.end_id} - {-1})
        stops: dict[int, StopReason] = {token: token for token in request.stop_token_ids}
        stops |= {token: word for word, token in special.items() if token is not None}
        self.end_ids = end_ids | stops.keys()
        self._stop_reasons = {token: reason for token, reason in stops.items() if token not in end_ids}
        self.key = key
        self.request = request
        self.prompt = np.asarray(prompt, dtype=np.int32)
        self.sampler = Sampler(
            request.sampling,
            prompt,
            self.end_ids,
            [*codec.encode_words(request.bad_words), *request.bad_word_ids],
            seed,
            None if grammar is None else grammar.start(self.end_ids),
        )
        self.memory: NgramIndex | RetrievalText | None = None
        self.generated: list[int] = []
        self.slot = -1
        self.reusable = 0
        self.reusable_in = -1
        self.cache_length = 0
        self.commit: list[int] = []
        self.root = -1
        self.features: Features | None = None
        self.pairs: Pairs | None = None
        self.proposals = Proposals() if request.draft_trees else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self.error: str | None = None
        self.stats = SequenceStats(prompt_tokens=len(prompt), seed=self.sampler.seed)
        stop_words = [word for word, token in special.items() if token is None]
        self._text = TextStream(codec, prompt, stop_words, request.include_stop_words, request.skip_special_tokens)
        self._stop_word_ids = request.stop_word_ids
        self._tail: deque[int] = deque(maxlen=max(map(len, request.stop_word_ids), default=0))
        self._stream_interval_s = stream_interval_s
        self._next_output = 0.0
        self._scores: list[LogProbs] = []
        self._output = self._new_output()
        if not request.exclude_input_in_output:
            self._output.text = request.text if request.text is not None else codec.decode(prompt)
        self.arrive(arrived)

    def arrive(self, at: float | None = None) -> None:
        """Begin to wait for a slot, and the time that the request has; `at`, else now, as `time.perf_counter` tells."""
        self.arrived = time.perf_counter() if at is None else at
        self.deadline = math.inf if self.request.timeout_s is None else self.arrived + self.request.timeout_s
        self._admitted = self._first_token = self.gained_at = self.arrived

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been through the target."""
        return self.root >= 0

    @property
    def to_prefill(self) -> int:
        """Tokens of the prompt that have not been through the target."""
        return len(self.prompt) - (self.cache_length if self.has_slot else self.reusable)

    @property
    def has_slot(self) -> bool:
        """Whether it has a slot of the cache."""
        return self.slot >= 0

    @property
    def scored(self) -> bool:
        """Whether all rows of the prompt have logits, for its log-probabilities."""
        return self.request.prompt_log_probs

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.stats.output_tokens

    @property
    def cached_tokens(self) -> np.ndarray:
        """The tokens int32 [n] whose rows are in the cache once the rows `commit` have been moved."""
        return np.append(self.prompt, np.array(self.generated, np.int32))[: self.cache_length]

    def admit(self, slot: int, rows: int = 0, commit: Iterable[int] = (), pairs: Pairs | None = None) -> None:
        """Take a slot of the cache, which has the prompt's first `rows` rows once the rows `commit` have been moved.
        `pairs`: what is known of them, instead of no pairs."""
        self.slot, self.cache_length, self.commit = slot, rows, list(commit)
        self.pairs = pairs or self.pairs
        self.stats.cached_tokens = rows
        self._admitted = time.perf_counter()
        self.stats.queue_ms = 1e3 * (self._admitted - self.arrived)

    def logits_of(self, rows: int) -> int:
        """How many logit rows, the last ones, the next `rows` tokens of the prompt have."""
        if self.scored:
            return rows
        return int(self.cache_length + rows == len(self.prompt))

    def kept(self, rows: list[int]) -> list[int]:
        """The rows whose features the drafter will need: all if it has a context cache, else the last."""
        return rows if self.pairs is not None else rows[-1:]

    def prefill(self, rows: int, features: Features | None) -> None:
        """`rows` more tokens of the prompt are in the cache; `features` are those of `kept`'s rows."""
        start, self.cache_length, self.commit = self.cache_length, self.cache_length + rows, []
        if self.pairs is not None and features is not None:
            if self.pairs.from_text and not start:
                self.pairs.add(features[:1], self.prompt[:1].tolist())
            self.pairs.add(features, self.prompt[start + 1 : self.cache_length + 1].tolist())
        else:
            self.features = features
        self.stats.rows_executed += rows

    def score(self, logits: np.ndarray) -> None:
        """Take the log-probabilities of the prompt's tokens after its last n rows, whose logits are float32 [n, V]."""
        following = self.prompt[self.cache_length - len(logits) + 1 : self.cache_length + 1].tolist()
        self._scores.append(LogProbs.of(logits[: len(following)], following, self.request.top_log_probs))

    def begin(self, verdict: Verdict | None) -> None:
        """Take the first token, chosen from the prompt's last row. None: the request wants no token, and ends."""
        self._first_token = self.gained_at = time.perf_counter()
        self.stats.prefill_ms = 1e3 * (self._first_token - self._admitted)
        if verdict is None:
            return self.finish("length")
        if self.pairs is not None:
            self.pairs.tokens += verdict.tokens
        self._advance(verdict, [(int(self.prompt[-1]), -1, 0.0)])
        return None

    def step(self, verdict: Verdict, features: Features | None, nodes: list[Node], goes_on: bool) -> Gain:
        """Take the tokens of a step over a tree, and return what it gained.

        `features` are those of `kept`'s rows; `goes_on` says whether the tree has nodes below the accepted path. Tokens
        after the text's end count as rejected.
        """
        stats = self.stats
        before, reused = stats.output_tokens, stats.reused
        taken = self._advance(verdict, nodes)
        accepted, path = taken - 1, verdict.path[:taken]
        goes_on = goes_on or taken < len(verdict.tokens)
        self.cache_length += taken
        self.commit = path if path[-1] != accepted else []
        self._count_depths(accepted, accepted + goes_on)
        if self.pairs is not None and features is not None:
            self.pairs.add(features[:taken], verdict.tokens[:taken])
        else:
            self.features = features
        rows = len(nodes)
        gain = Gain(stats.output_tokens - before, rows - 1, accepted, stats.reused - reused, rows)
        stats.steps += 1
        stats.drafted += gain.drafted
        stats.accepted += gain.accepted
        stats.rows_executed += gain.rows_executed
        return gain

    def _count_depths(self, accepted: int, offered: int) -> None:
        by_depth = self.stats.offered_by_depth, self.stats.accepted_by_depth
        for counts, deepest in zip(by_depth, (offered, accepted), strict=True):
            counts.extend([0] * (offered - len(counts)))
            for level in range(deepest):
                counts[level] += 1

    def finish(self, reason: FinishReason) -> None:
        """End the sequence: held back text becomes certain."""
        self.finish_reason = reason
        self._text.finish()
        now = time.perf_counter()
        if self.prefilled:
            self.stats.decode_ms = 1e3 * (now - self._first_token)
        if not self.has_slot:
            self.stats.queue_ms = 1e3 * (now - self.arrived)

    def take_output(self) -> Output | None:
        """What is new, for a client that streams and is due some text, or when the sequence has finished; else None."""
        output, now = self._output, time.perf_counter()
        due = self.request.stream and output.token_ids and now >= self._next_output
        if self.finish_reason is None and not due:
            return None
        if self._scores and self.to_prefill <= 0:
            self._give_scores(output)
        output.text += self._text.take()
        if output.text:
            self._next_output = now + self._stream_interval_s
        output.finish_reason, output.stop_reason = self.finish_reason, self.stop_reason
        output.error = self.error
        if self.finish_reason:
            output.stats = self.stats
        self._output = self._new_output()
        return output

    def _give_scores(self, output: Output) -> None:
        output.prompt_log_probs = [None, *chain.from_iterable(scores.chosen.tolist() for scores in self._scores)]
        if self.request.top_log_probs:
            output.prompt_top_log_probs = [[], *chain.from_iterable(scores.top for scores in self._scores)]
        self._scores = []

    def _new_output(self) -> Output:
        scored, alternatives = self.request.return_log_probs, self.request.top_log_probs
        return Output(
            key=self.key,
            prompt_tokens=len(self.prompt),
            log_probs=[] if scored else None,
            top_log_probs=[] if alternatives else None,
            draft_trees=[] if self.request.draft_trees else None,
        )

    def _advance(self, verdict: Verdict, nodes: list[Node]) -> int:
        """Take the tokens up to the text's end, an end token included; how many they are. `nodes` are the tree's."""
        self.root = verdict.tokens[-1]
        taken, before = 0, self.stats.output_tokens
        while not self.finish_reason and taken < len(verdict.tokens):
            self._append(verdict, taken)
            taken += 1
        if self.proposals is not None and self._output.draft_trees is not None:
            gained = verdict.tokens[: self.stats.output_tokens - before]
            path = verdict.path[: taken + 1]
            if taken > len(gained):  # an end token: accepted if it was drafted, though verifiers do not follow it
                end = verdict.tokens[taken - 1], path[-1]
                path += [node for node, (token, parent, _) in enumerate(nodes) if (token, parent) == end][:1]
            origins = self.proposals.take(nodes)
            tokens, parents, scores = (list(column) for column in zip(*nodes, strict=True))
            self._output.draft_trees.append(DraftTree(tokens, parents, scores, origins, path, gained))
        self.generated += verdict.tokens[:taken]
        if self.memory is not None:
            self.memory.extend(verdict.tokens[:taken])
        return taken

    def _append(self, verdict: Verdict, place: int) -> None:
        token = verdict.tokens[place]
        if token in self.end_ids:
            self.stop_reason = self._stop_reasons.get(token)
            return self.finish("stop")
        output, scores = self._output, verdict.log_probs
        output.token_ids.append(token)
        output.drafted.append(place + 1 < len(verdict.tokens))
        if scores is not None and output.log_probs is not None:
            output.log_probs.append(float(scores.chosen[place]))
            if output.top_log_probs is not None:
                output.top_log_probs.append(scores.top[place])
        self.stats.output_tokens += 1
        grammar = self.sampler.grammar
        if self._text.push(token) or self._completes_stop_word(token):
            self.stop_reason = self._text.stop_word
            return self.finish("stop")
        if grammar is not None and grammar.complete_length == self.stats.output_tokens:
            if not grammar.failed:
                return self.finish("stop")
            if self.remaining and self.request.guide is not None:
                self.error = (
                    f"guide.text: the {self.request.guide.kind} is too complex to go on with after "
                    f"{self.stats.output_tokens} tokens of the answer: expected a simpler one, or smaller repetitions"
                )
                return self.finish("error")
        if not self.remaining:
            return self.finish("length")
        return None

    def _completes_stop_word(self, token: int) -> bool:
        self._tail.append(token)
        tail = list(self._tail)
        return any(tail[-len(word) :] == word for word in self._stop_word_ids)
