"""In-flight batching: one step of every running sequence together; sequences join and leave between steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import cast
from weakref import WeakMethod

import numpy as np

from redraft import metrics
from redraft.batch import TargetBatch, step_rows
from redraft.budgets.controller import BudgetController
from redraft.budgets.cost import StepShape
from redraft.bundle.method import MethodConfig
from redraft.decoding.log_probs import LogProbs
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree, join_trees, mask_width
from redraft.decoding.verification import Verdict, walk_all
from redraft.drafting import start_method
from redraft.drafting.groups import Group, roots_only
from redraft.drafting.method import AutoRegressive
from redraft.drafting.served import ServedTexts
from redraft.engines.api import Engine, LogitRows
from redraft.engines.features import Features, take_rows
from redraft.engines.timing import EngineClock, TimedEngine
from redraft.errors import Code, RequestError
from redraft.learning.answers import Answer, AnswerStore
from redraft.learning.recording import Recording
from redraft.output import Output
from redraft.request import AUTO_REGRESSIVE
from redraft.request_state import RequestState
from redraft.scheduling.counts import EngineMetrics, Totals
from redraft.scheduling.packing import Places, PromptRows, pack
from redraft.scheduling.prompt_rows import share_rows
from redraft.scheduling.slots import Limits, Slots

Chunk = tuple[RequestState, int]
"""A prompt, and how many of its next rows a step takes."""
Send = Callable[[list[Output]], None]
LOOKED_AT = 128
"""Waiting prompts, the earliest, among which a step looks for the shortest."""


WHOLE = ("stop", "length")
"""The ends of an answer that is stored for drafters to learn from."""


class Overloaded(RequestError):
    """The waiting queue is full."""

    def __init__(self, message: str):
        super().__init__(message, Code.OVERLOADED)


@dataclass(frozen=True)
class Status:
    """Sequences that run and that wait, the share of all slots' cache rows in use, 0 to 1, and the sequences that were
    ever submitted."""

    running: int
    waiting: int
    kv_use: float
    submitted: int


class Scheduler:
    """Runs sequences on an engine. Not thread-safe: one thread submits, cancels and steps."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        methods: Mapping[str, MethodConfig] | None = None,
        bigrams: np.ndarray | None = None,
        observe: Callable[[TokenTree, int, Verdict], None] | None = None,
        prefix_reuse: bool = True,
        unknown_tokens: frozenset[int] = frozenset(),
        budgets: BudgetController | None = None,
        texts: ServedTexts | None = None,
        answers: AnswerStore | None = None,
    ):
        """`methods` by name, the first of which serves requests that name none; `observe` is shown every step's tree,
        index in it and verdict of each sequence. `unknown_tokens` are not drafted, since the engine never gives them.
        `budgets` say how much to draft; None: as much as each method's configuration says, whatever runs. `texts` keep
        what is served, and are drafted from. `answers` store what drafters will learn from. With `prefix_reuse`
        requests begin after the rows of an earlier one with the same first tokens: see `Slots`.

        Raises ValueError where a method makes no sense, or asks of the engine's drafter what it cannot do.
        """
        methods = methods or {}
        self.limits = limits
        self.metrics = EngineMetrics(texts.store if texts else None)
        self.metrics[metrics.SLOTS].set(limits.slots)
        # Weak: a scheduler that refers to itself would keep its engine until the garbage collector comes.
        status = WeakMethod(self.status)
        for entry, name in ((metrics.RUNNING, "running"), (metrics.WAITING, "waiting"), (metrics.CACHE_USE, "kv_use")):
            self.metrics[entry].set_function(partial(_gauge, status, name))
        if budgets:
            self.metrics[metrics.STEP_ERROR].set_function(lambda: budgets.costs.error)
        self._answers = answers
        self._submitted = 0
        if answers:
            outcomes = self.metrics[metrics.ANSWERS_TO_LEARN]
            answers.count = lambda outcome: outcomes.labels(outcome).inc()
        self.totals = Totals(self.metrics)
        self.clock = EngineClock()
        self._engine = TimedEngine(engine, self.clock)
        self._sources = {AUTO_REGRESSIVE: AutoRegressive()} | {
            name: start_method(
                config,
                self._engine.drafters.get(name),
                limits.max_tree,
                bigrams,
                unknown_tokens,
                budgets and budgets.of(name),
                texts.store if texts else None,
            )
            for name, config in methods.items()
        }
        self._default = next(iter(methods), AUTO_REGRESSIVE)
        self._observe, self._budgets, self._texts = observe, budgets, texts
        self._waiting: deque[RequestState] = deque()
        self._left = False
        """Whether a sequence has ended since the last step."""
        self._cancelled: list[RequestState] = []
        """Those that the next step ends."""
        self._due = math.inf
        """No deadline is before."""
        self._running: list[RequestState] = []
        self._decoding = Group()
        """Those that decode."""
        self._parts: list[tuple[AutoRegressive, list[int], Group]] = []
        """The same by what drafts for them, each part with its indices."""
        reuse = prefix_reuse and self._engine.reuse_refusal is None
        self._slots = Slots(limits, self._engine.copy if reuse else None)
        self._words = mask_width(limits.max_tree)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._running or self._waiting)

    @property
    def prefilling(self) -> bool:
        """Whether a prompt waits or has not been through the target entirely."""
        return bool(self._waiting) or any(not sequence.prefilled for sequence in self._running)

    def require_room(self) -> None:
        """Raises Overloaded when the queue is full and no slot is free."""
        if len(self._waiting) >= self.limits.max_queue + len(self._slots.free):
            raise Overloaded(f"overloaded: {self.limits.max_queue} requests wait for a slot already: try again later")

    def submit(self, sequence: RequestState) -> None:
        """Queue a sequence. Raises Overloaded as `require_room` does."""
        self.require_room()
        self.metrics[metrics.REQUESTS].inc()
        self._submitted += 1
        self._due = min(self._due, sequence.deadline)
        sequence.method = sequence.request.method or self._default
        source = self._source(sequence)
        sequence.pairs, sequence.reads_features = source.pairs(), source.reads_features
        if self._answers and self._answers.takes(sequence.request):
            sequence.recording, sequence.reads_features = Recording(self._answers.hidden_size), True
        self._waiting.append(sequence)

    def _source(self, sequence: RequestState) -> AutoRegressive:
        return self._sources[sequence.method]

    def _chooser(self, sequence: RequestState) -> Sampler | None:
        sequence.chooser = self._source(sequence).chooser(sequence)
        return sequence.chooser

    def cancel(self, key: Hashable) -> None:
        """End a sequence before the next step; its final output comes with that step. Unknown keys are ignored.
        May be called while outputs are sent."""
        self._cancelled += [sequence for sequence in (*self._running, *self._waiting) if sequence.key == key]

    def _end_cancelled(self) -> None:
        for sequence in self._cancelled:
            if sequence.finish_reason is None:
                sequence.finish("cancelled")
                self._left = True
        self._cancelled.clear()

    def _end_late(self, now: float) -> None:
        if now < self._due:
            return
        unfinished = [sequence for sequence in (*self._running, *self._waiting) if sequence.finish_reason is None]
        for sequence in unfinished:
            if sequence.deadline <= now:
                sequence.finish("timeout")
                self._left = True
        self._due = min(
            (sequence.deadline for sequence in unfinished if sequence.finish_reason is None), default=math.inf
        )

    def drop_all(self) -> None:
        """Forget every sequence, without outputs: after a step that raised, their states are not to be trusted."""
        self._waiting.clear()
        self._running.clear()
        self._cancelled.clear()
        self._decoding, self._parts = Group(), []
        self._slots.forget()
        self.metrics.forget()

    def status(self) -> Status:
        """How loaded it is."""
        used = sum(sequence.cache_length for sequence in self._running)
        kv_use = used / (self.limits.slots * self.limits.max_len)
        return Status(len(self._running), len(self._waiting), kv_use, self._submitted)

    def step(self) -> list[Output]:
        """Admit what fits, execute one step of all running sequences, and return their outputs."""
        outputs: list[Output] = []
        self._step(outputs.extend, overlap=False)
        return outputs

    def step_and_send(self, send: Send) -> None:
        """`step`, but hand the outputs to `send`. If the engine leaves the host free while a device executes, the text
        of sequences that go on is read and sent then, in the next step. What begins or ends in a step is sent at its
        end: a client's first text does not wait for the next drafts."""
        self._step(send, self._engine.overlaps)

    def _step(self, send: Send, overlap: bool) -> None:
        started, target_s, draft_s = time.perf_counter(), self.clock.target_s, self.clock.draft_s
        if self._texts:
            self._texts.read()
        self._end_cancelled()
        self._end_late(started)
        ended = self._sweep() if self._left else []
        decoding = self._decode()
        chunks = self._prefill_chunks(len(decoding))
        if not self._running:
            send(_outputs(ended))
            return
        unasked = bool(self._budgets and self._budgets.unasked and not chunks)
        if self._budgets and not unasked:
            self._budgets.begin(StepShape(len(decoding), len(chunks), sum(count for _, count in chunks)))
        tree = roots_only(decoding) if unasked else self._draft(decoding)
        batch = self._batch(decoding, tree, chunks)
        prefilling = (sequence for sequence, _ in chunks)
        samplers = [sequence.chooser or self._chooser(sequence) for sequence in (*decoding, *prefilling)]
        meanwhile = (lambda: send(_outputs(self._running))) if overlap else None
        logits, features = self._engine.execute(batch, samplers, meanwhile)
        verdicts = self._verify(decoding, tree, logits, samplers)
        kept = self._kept(decoding, tree, verdicts, chunks, features)
        gaps_s = self._take_trees(decoding, tree, verdicts, kept[: len(decoding)])
        self._take_chunks(chunks, len(tree.tokens), logits, kept[len(decoding) :])
        ended += self._sweep()
        begun = [sequence for sequence, _ in chunks if sequence.prefilled and sequence.finish_reason is None]
        outputs = _outputs((*(begun if overlap else self._running), *ended))
        target_s, draft_s = self.clock.target_s - target_s, self.clock.draft_s - draft_s
        step_s = time.perf_counter() - started
        self.metrics.note_step(step_s, target_s + draft_s, draft_s, gaps_s)
        if self._budgets and unasked:
            self._budgets.note_unasked(step_s)
        elif self._budgets and decoding:
            accepted = [len(verdict.path) - 1 for verdict in verdicts]
            self._budgets.end(decoding.methods, decoding.bands, tree, accepted, step_s, target_s)
            self.metrics.note_expected(self._budgets.step.expected)
        send(outputs)  # what the client's end takes is no part of the step's time

    def _admit(self, sequence: RequestState) -> None:
        self._waiting.remove(sequence)
        self._slots.admit(sequence)
        sequence.scope = self._texts.scopes.of(sequence.request) if self._texts else 0
        sequence.memory = self._source(sequence).remember(sequence)
        self.metrics.follow(sequence.method, sequence.stats)
        self.metrics[metrics.PROMPT_TOKENS].inc(len(sequence.prompt))
        if self._slots.reads(sequence):
            self.metrics[metrics.CACHE_QUERIES].inc(len(sequence.prompt))
            self.metrics[metrics.CACHE_HITS].inc(sequence.stats.cached_tokens)
        self._running.append(sequence)

    def _sweep(self) -> list[RequestState]:
        """Sequences that have finished leave and free their slots; returns them."""
        ended = [sequence for sequence in self._running if sequence.finish_reason]
        if self._left:
            self._left = False
            ended += [sequence for sequence in self._waiting if sequence.finish_reason]
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.finish_reason)
        if not ended:
            return ended
        for sequence in ended:
            self.metrics.count_end(cast(str, sequence.finish_reason), sequence.stats)
            if sequence.has_slot:
                self._slots.release(sequence)
                if self._texts:
                    self._texts.take(sequence)
            if self._answers and sequence.recording is not None and sequence.finish_reason in WHOLE:
                answer = sequence.text_tokens[len(sequence.prompt) :]
                self._answers.put(Answer(sequence.recording, sequence.prompt, answer))
        self._cancelled = [sequence for sequence in self._cancelled if not sequence.finish_reason]
        self._running = [sequence for sequence in self._running if not sequence.finish_reason]
        if not self._running:  # nothing may be kept of requests that are gone
            self._decoding, self._parts = Group(), []
        return ended

    def _prefill_chunks(self, decoding: int) -> list[Chunk]:
        """Which sequences prefill how many rows in this step, in which `decoding` decode; those that wait take a slot
        with their first rows, unless these are about to be there for another."""
        if decoding == len(self._running) and not self._waiting:
            return []
        prompts = [sequence for sequence in self._running if not sequence.prefilled]
        followers: dict[RequestState, int] = {}
        if free := len(self._slots.free):
            earliest = list(islice(self._waiting, LOOKED_AT))
            self._slots.count_reusable(earliest)
            for sequence in earliest:
                if (leader := self._leader(sequence)) is None:
                    prompts.append(sequence)
                else:
                    followers[leader] = min(sequence.to_prefill, followers.get(leader, sequence.to_prefill))
        rows = step_rows(self.limits.prefill_chunk, decoding)
        chunks = []
        for sequence, count in share_rows(prompts, free, rows, decoding, followers):
            if not sequence.has_slot:
                if self._leader(sequence):  # one that has just been admitted
                    continue
                self._admit(sequence)
            chunks.append((sequence, min(count, sequence.to_prefill)))
        return chunks

    def _leader(self, sequence: RequestState) -> RequestState | None:
        return self._slots.leader(sequence)

    def _decode(self) -> Group:
        """The sequences that decode now."""
        decoding = Group(sequence for sequence in self._running if sequence.prefilled)
        if decoding != self._decoding:
            parts: dict[AutoRegressive, list[int]] = {}
            for index, sequence in enumerate(decoding):
                parts.setdefault(self._source(sequence), []).append(index)
            # Fixed budgets first: their rows pass whatever is chosen for the others.
            ordered = sorted(parts.items(), key=lambda part: not part[0].fixed_budget)
            self._parts = [(source, indices, decoding.of(indices)) for source, indices in ordered]
            self._decoding = decoding
            if self._budgets:
                self._budgets.unasked = 0
        return self._decoding

    def _draft(self, decoding: Group) -> TokenTree:
        """Draft trees of the sequences, in their order; each method drafts for all of its own at once."""
        drafted = []
        for source, indices, part in self._parts:
            tree = source.draft(part, len(decoding))
            if self._budgets and source.fixed_budget:
                self._budgets.include(part.methods[0], part.bands, tree)
            drafted.append((indices, tree))
        return join_trees(drafted) if drafted else TokenTree.root_only([])

    def _batch(self, decoding: Group, tree: TokenTree, chunks: list[Chunk]) -> TargetBatch:
        sequences = [*decoding, *(sequence for sequence, _ in chunks)]
        places = Places(
            slots=[sequence.slot for sequence in sequences],
            cache_lengths=[sequence.cache_length for sequence in sequences],
            commits=[sequence.commit for sequence in sequences],
        )
        return pack(tree, [_prompt_rows(*chunk) for chunk in chunks], places, self._words)

    def _verify(
        self, sequences: Group, tree: TokenTree, logits: LogitRows, choosers: list[Sampler | None]
    ) -> list[Verdict]:
        # Where the engine has chosen, or nothing but logits says what is chosen, all trees are walked at once. Grammars
        # follow each token.
        plain = not (sequences.filtered or None in choosers)
        if not sequences.guided and isinstance(logits, np.ndarray) and (logits.ndim == 1 or plain):
            verdicts = walk_all(tree, logits[: len(tree.tokens)], sequences.walkers)
        else:
            verdicts = self._verify_mixed(sequences, tree, logits)
        if self._observe:
            for index, verdict in enumerate(verdicts):
                self._observe(tree, index, verdict)
        return verdicts

    def _verify_mixed(self, sequences: Group, tree: TokenTree, logits: LogitRows) -> list[Verdict]:
        rows = [logits[start:end] for start, end in pairwise(tree.offsets.tolist())]
        walked = [
            index
            for index, sequence in enumerate(sequences)
            if rows[index].ndim == 1 and sequence.sampler.grammar is None
        ]
        verdicts: dict[int, Verdict] = {}
        if walked:
            chosen, walkers = np.concatenate([rows[b] for b in walked]), sequences.of(walked).walkers
            verdicts = dict(zip(walked, walk_all(tree.of(walked), chosen, walkers), strict=True))
        return [
            verdicts[index] if index in verdicts else self._verdict(sequence, tree, index, rows[index])
            for index, sequence in enumerate(sequences)
        ]

    def _kept(
        self,
        sequences: Group,
        tree: TokenTree,
        verdicts: list[Verdict],
        chunks: list[Chunk],
        features: Features | None,
    ) -> list[Features | None]:
        """The features that each sequence keeps, first of trees, then of chunks: slices of one copy."""
        reads = sequences.reads_features or any(sequence.reads_features for sequence, _ in chunks)
        if features is None or not reads:
            return [None] * (len(sequences) + len(chunks))
        if len(tree.tokens) == len(sequences) and not chunks:  # nothing is drafted: a row of each
            copy = take_rows(features, [*range(len(sequences))])
            return [copy[row : row + 1] if each.reads_features else None for row, each in enumerate(sequences)]
        rows, ends = list[int](), [0]
        for sequence, start, verdict in zip(sequences, tree.offsets.tolist(), verdicts, strict=False):
            rows += [start + node for node in sequence.kept(verdict.path)]
            ends.append(len(rows))
        start = len(tree.tokens)
        for sequence, count in chunks:
            rows += sequence.kept(range(start, start + count))
            ends.append(len(rows))
            start += count
        kept = take_rows(features, rows)
        return [kept[start:end] for start, end in pairwise(ends)]

    def _take_trees(
        self, sequences: list[RequestState], tree: TokenTree, verdicts: list[Verdict], kept: list[Features | None]
    ) -> list[float]:
        """Returns how long after its last tokens each sequence gains these."""
        now = time.perf_counter()
        gaps_s = [now - sequence.gained_at for sequence in sequences]
        bounds, parents = pairwise(tree.offsets.tolist()), tree.parents.tolist()
        taken = zip(sequences, verdicts, kept, bounds, strict=True)
        for index, (sequence, verdict, features, (start, end)) in enumerate(taken):
            goes_on = end - start > len(verdict.path) and verdict.path[-1] in parents[start:end]
            nodes = tree.nodes[index] if sequence.proposals is not None else ()
            sequence.step(verdict, features, end - start, goes_on, nodes)
            sequence.gained_at = now
        return gaps_s

    def _take_chunks(self, chunks: list[Chunk], logit_row: int, logits: LogitRows, kept: list[Features | None]) -> None:
        for (sequence, count), features in zip(chunks, kept, strict=True):
            wanted = sequence.logits_of(count)
            sequence.prefill(count, features)
            if not wanted:
                continue
            rows = logits[logit_row : logit_row + wanted]
            logit_row += wanted
            if sequence.scored:
                sequence.score(rows)
            if sequence.cache_length == len(sequence.prompt):
                sequence.begin(self._first_token(sequence, rows[-1:]) if sequence.remaining else None)

    def _first_token(self, sequence: RequestState, logits: np.ndarray) -> Verdict:
        """From its logits float32 [1, V], or its token int32 [1]."""
        return self._verdict(sequence, TokenTree.root_only(sequence.prompt[-1:]), 0, logits)

    def _verdict(self, sequence: RequestState, tree: TokenTree, index: int, logits: np.ndarray) -> Verdict:
        """What its method keeps of a tree, with log-probabilities where the request wants them."""
        verdict, request = self._source(sequence).verify(tree, index, logits, sequence.sampler), sequence.request
        if request.return_log_probs:
            verdict.log_probs = LogProbs.of(logits[verdict.path], verdict.tokens, request.top_log_probs)
        return verdict


def _outputs(sequences: Iterable[RequestState]) -> list[Output]:
    """What there is to send of these."""
    return [output for sequence in sequences if (output := sequence.take_output()) is not None]


def _gauge(status: WeakMethod[Callable[[], Status]], name: str) -> float:
    """What a scheduler's status says now; 0 after its end."""
    return getattr(call(), name) if (call := status()) else 0


def _prompt_rows(sequence: RequestState, count: int) -> PromptRows:
    """The next rows of its prompt."""
    start = sequence.cache_length
    return PromptRows(sequence.prompt[start : start + count], sequence.logits_of(count))
