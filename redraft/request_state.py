"""The state of one request while it is served: its tokens, its rows in the KV cache, its end, its statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from redraft.decoding.log_probs import LogProbs
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.origins import Proposals
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import Node
from redraft.decoding.verification import Verdict
from redraft.engines.features import Features
from redraft.learning.recording import Recording
from redraft.output import Output, OutputStream
from redraft.pairs import Pairs
from redraft.request import DraftTree, FinishReason, GenerateRequest, SequenceStats, StopReason
from redraft.text import TextCodec

if TYPE_CHECKING:
    from redraft.grammar.state import Grammar


class RequestState:
    """A request's state. The cache holds its first `cache_length` tokens once the rows `commit` have been moved.

    `root` is the last certain token, whose row is not in the cache yet. For its drafter it keeps `features` [1, F] of
    the token before the root, or the `pairs` that a drafter with a context ingests, if that `reads_features` at all.
    `method` is the name of the method that drafts for it. `temperature` is what the target's logits are divided by; 0:
    greedy.

    `chooser` is its sampler, from when on the engine may choose its tokens with it; None before, or never.
    `memory` is what its method drafts from beside the drafter, and is told every token of; None: nothing.
    `scope` is that of the served texts which it is drafted from and belongs to; 0: none.
    `reusable` is how many tokens of the prompt a slot would have in place, while it waits for one; `reusable_in` the
    state of the slots in which that was counted.
    `gained_at` is when it last gained tokens, as `time.perf_counter` tells it.
    `recording` is what drafters will learn from; None where nothing is to be stored. Where there is one, features are
    read whatever drafts.
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
        self.chooser: Sampler | None = None
        self.temperature = 0.0 if request.sampling.greedy else request.sampling.divisor
        self.method = ""
        self.reads_features = False
        self.memory: NgramIndex | None = None
        self.scope = 0
        self.slot = -1
        self.reusable = 0
        self.reusable_in = -1
        self.cache_length = 0
        self.commit: list[int] = []
        self.root = -1
        self.features: Features | None = None
        self.recording: Recording | None = None
        self.pairs: Pairs | None = None
        self.proposals = Proposals() if request.draft_trees else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self._end_token: list[int] = []
        """The token that ended the text, and is no part of it, if one did."""
        self.error: str | None = None
        self.stats = SequenceStats(prompt_tokens=len(prompt), seed=self.sampler.seed)
        stop_words = [word for word, token in special.items() if token is None]
        self._output = OutputStream(key, request, prompt, codec, stop_words, stream_interval_s)
        self._asks_each_token = bool(stop_words or request.stop_word_ids or grammar is not None)
        """Whether any token may end the text, so that each is looked at on its own."""
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
        return np.append(self.prompt, np.array(self._output.token_ids, np.int32))[: self.cache_length]

    @property
    def text_tokens(self) -> np.ndarray:
        """The tokens int32 [n] of its prompt and its answer so far, with the one that ended it."""
        return np.append(self.prompt, np.array([*self._output.token_ids, *self._end_token], np.int32))

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

    def kept(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows whose features the drafter will need: all if it has a context cache or is recorded, else the
        last, if it reads features."""
        if self.pairs is not None or (self.recording is not None and self.prefilled):
            return rows
        return rows[-1:] if self.reads_features else []

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
        self._output.score_prompt(LogProbs.of(logits[: len(following)], following, self.request.top_log_probs))

    def begin(self, verdict: Verdict | None) -> None:
        """Take the first token, chosen from the prompt's last row. None: the request wants no token, and ends."""
        self._first_token = self.gained_at = time.perf_counter()
        self.stats.prefill_ms = 1e3 * (self._first_token - self._admitted)
        if verdict is None:
            return self.finish("length")
        if self.pairs is not None:
            self.pairs.tokens += verdict.tokens
        if self.recording is not None:
            self.recording.tokens += verdict.tokens
        self._advance(verdict, [(int(self.prompt[-1]), -1, 0.0)])
        return None

    def step(
        self, verdict: Verdict, features: Features | None, rows: int, goes_on: bool, nodes: Sequence[Node] = ()
    ) -> None:
        """Take the tokens of a step over a tree of `rows` rows.

        `features` are those of `kept`'s rows; `goes_on` says whether the tree has nodes below the accepted path;
        `nodes` are the tree's, for a request that wants to see it. Tokens after the text's end count as rejected.
        """
        taken = self._advance(verdict, nodes)
        tokens, path, accepted = verdict.tokens, verdict.path, taken - 1
        if taken < len(tokens):
            tokens, path, goes_on = tokens[:taken], path[:taken], True
        self.cache_length += taken
        self.commit = path if path[-1] != accepted else []
        if self.pairs is not None and features is not None:
            self.pairs.add(features[:taken], tokens)
        else:
            self.features = None if features is None else features[-1:]
        if self.recording is not None and features is not None:
            self.recording.add(features[:taken], tokens)
        stats = self.stats
        stats.steps += 1
        stats.rows_executed += rows
        if rows > 1:
            stats.drafted += rows - 1
            stats.accepted += accepted
            self._count_depths(accepted, goes_on)

    def _count_depths(self, accepted: int, goes_on: bool) -> None:
        offered_by_depth, accepted_by_depth = self.stats.offered_by_depth, self.stats.accepted_by_depth
        if (more := accepted + goes_on - len(offered_by_depth)) > 0:
            offered_by_depth += [0] * more
            accepted_by_depth += [0] * more
        for level in range(accepted):
            offered_by_depth[level] += 1
            accepted_by_depth[level] += 1
        if goes_on:
            offered_by_depth[accepted] += 1

    def finish(self, reason: FinishReason) -> None:
        """End the sequence: its next output is the last one."""
        self.finish_reason = reason
        now = time.perf_counter()
        if self.prefilled:
            self.stats.decode_ms = 1e3 * (now - self._first_token)
        if not self.has_slot:
            self.stats.queue_ms = 1e3 * (now - self.arrived)

    def take_output(self) -> Output | None:
        """Return what is new, for a client that streams and is due some text, or when the request has ended; else
        None."""
        if self.finish_reason is None and not self._output.due:
            return None
        output = self._output.take(self.to_prefill <= 0, finished=self.finish_reason is not None)
        output.finish_reason, output.stop_reason, output.error = self.finish_reason, self.stop_reason, self.error
        if self.finish_reason:
            output.stats = self.stats
        return output

    def _advance(self, verdict: Verdict, nodes: Sequence[Node]) -> int:
        """Take the tokens up to the text's end, an end token included; how many they are. `nodes` are the tree's."""
        self.root = verdict.tokens[-1]
        before = self.stats.output_tokens
        taken = self._append_each(verdict) if self._asks_each_token else self._append_all(verdict)
        if self.proposals is not None:
            gained = verdict.tokens[: self.stats.output_tokens - before]
            path = verdict.path[: taken + 1]
            if taken > len(gained):  # an end token: accepted if it was drafted, though verifiers do not follow it
                end = verdict.tokens[taken - 1], path[-1]
                path += [node for node, (token, parent, _) in enumerate(nodes) if (token, parent) == end][:1]
            origins = self.proposals.take(nodes)
            tokens, parents, scores = (list(column) for column in zip(*nodes, strict=True))
            self._output.add_tree(DraftTree(tokens, parents, scores, origins, path, gained))
        if self.memory is not None:
            self.memory.extend(verdict.tokens[:taken])
        return taken

    def _append_all(self, verdict: Verdict) -> int:
        """`_append_each` for a request whose text only an end token or its length ends."""
        tokens, room = verdict.tokens, self.remaining
        gained = taken = len(tokens)
        if taken > room:
            gained = taken = room
        if not self.end_ids.isdisjoint(tokens):
            ends = (index for index in range(gained) if tokens[index] in self.end_ids)
            if (end := next(ends, None)) is not None:
                gained, taken = end, end + 1
        self.stats.output_tokens += gained
        if gained:
            self._output.extend(verdict, 0, gained)
        if taken > gained:
            self._end_with(tokens[gained])
        elif gained == room:
            self.finish("length")
        return taken

    def _append_each(self, verdict: Verdict) -> int:
        """Append the verdict's tokens to the output, and end the text where it ends; how many were taken."""
        taken = 0
        while not self.finish_reason and taken < len(verdict.tokens):
            self._append(verdict, taken)
            taken += 1
        return taken

    def _append(self, verdict: Verdict, index: int) -> None:
        token = verdict.tokens[index]
        if token in self.end_ids:
            return self._end_with(token)
        self.stats.output_tokens += 1
        grammar = self.sampler.grammar
        if self._output.push(verdict, index):
            self.stop_reason = self._output.stop_word
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

    def _end_with(self, token: int) -> None:
        self.stop_reason, self._end_token = self._stop_reasons.get(token), [token]
        self.finish("stop")
