"""What the host adds to a step: the scheduler with an engine that answers at once.

    python -m benchmarks.speed.host_overhead
    python -m benchmarks.speed.host_overhead --concurrency 1 32 --tree-budget 31 --logits
    python -m benchmarks.speed.host_overhead --concurrency 64 --target-ms 12 --overlap
    python -m benchmarks.speed.host_overhead --served-tokens 1000000

Scheduling, drafting, tree construction, the choice of budgets and verification are the product's own; only the networks
are not there. So no model is needed, and what is measured is the part of a step that no faster engine makes shorter.
The controller of budgets is told of a target that takes the same time whatever it verifies, so that all of
`--tree-budget` pays, and one step in a hundred drafts nothing, as on a server. Every stream is greedy
and streams its text; all prompts are prefilled when measuring begins. A figure is the mean over the steps
of the processor time outside the engine: some steps count metrics for many. Other programs that run meanwhile take none
of it. Texts are due by the clock: `--target-ms` lets a step's time pass, so that as many are due as on a server. With
`--overlap` what the host does while the target executes is not counted, as on a GPU that takes longer. With
`--served-tokens` other answers of the null target, of that many tokens in all, join the n-grams.

The null target continues a text by a rule that the null drafter knows seven times in ten, over so few different tokens
that n-grams recur: trees have depth, and about three tokens are accepted per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer, decoders, models

from benchmarks.command import Concurrency, Report, run
from redraft.batch import DraftBatch, DraftCandidates, SharedNoise, TargetBatch
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, TimeTable
from redraft.bundle.method import MethodConfig
from redraft.decoding.token_tree import TokenTree
from redraft.drafting.served import ServedTexts, TextOptions
from redraft.engines.api import Meanwhile, Samplers
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.output import Output
from redraft.request import AUTO_REGRESSIVE, INT32_MAX, GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from redraft.text import TextCodec

BEST_FIRST, WITH_NGRAMS = "best-first", "best-first with n-grams"
METHODS = (AUTO_REGRESSIVE, BEST_FIRST, WITH_NGRAMS)
WORDS = 251
"""Different tokens in a text, a prime."""
WIDTH, LENGTH, CANDIDATES = 4, 5, 8
"""The shape of a shipped drafter's search."""
CHANCES = np.array([0.55, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.01])
"""A null drafter's probabilities of the candidates of any node."""
HIDDEN, PROMPT, WARM_UP, STREAM_INTERVAL_S = 576, 64, 20, 0.04
SERVED_LENGTH = 500
TARGET_S = 0.02
"""What the controller is told that the target took."""


@dataclass(frozen=True)
class Overhead:
    """Milliseconds of processor time per step outside the engine, with what one stream's steps held on average."""

    method: str
    streams: int
    mean_ms: float
    tokens_per_step: float
    rows_per_step: float


class NullEngine:
    """A target and, under every name, a drafter, which read no more than a row's token and position.

    It gives tokens, as an engine on a GPU does, or float32 logits of `vocab_size`, from which the host chooses.
    `spent_s` is the processor time that it took.
    """

    reads_context = reads_text = False
    reuse_refusal = "it has no cache"
    step_shapes: Sequence[tuple[int, int]] = ()

    def __init__(self, rows: int, vocab_size: int, logits: bool, target_s: float = 0.0, overlaps: bool = False):
        self.overlaps, self._target_s = overlaps, target_s
        self.drafters: Mapping[str, NullEngine] = dict.fromkeys(METHODS, self)
        self._hidden = np.zeros((rows, HIDDEN), np.float32)
        self._logits = np.zeros((rows, vocab_size), np.float32) if logits else None
        self._log_probs, self._parents = _search()
        self.spent_s = 0.0

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Engine.execute`."""
        started, end = time.thread_time(), time.perf_counter() + self._target_s
        answer = self._answer(batch)
        if meanwhile is not None:
            meanwhile()
        time.sleep(max(end - time.perf_counter(), 0.0))
        self.spent_s += time.thread_time() - started
        return answer

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """See `DraftEngine.draft`."""
        started = time.thread_time()
        candidates = self._candidates(batch.tokens)
        self.spent_s += time.thread_time() - started
        return candidates

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""

    def close(self) -> None:
        """See `Engine.close`."""

    def _answer(self, batch: TargetBatch) -> tuple[np.ndarray, np.ndarray]:
        tokens, hidden = self._next(batch), self._hidden[: len(batch.input_ids)]
        if self._logits is None:
            return tokens, hidden
        logits = self._logits[: len(tokens)]
        logits[:, :WORDS] = 0
        logits[np.arange(len(tokens)), tokens] = 1
        return logits, hidden

    def _candidates(self, roots: np.ndarray) -> DraftCandidates:
        """The most likely candidate of a node is what the rule says."""
        count = len(roots)
        paths = np.repeat(roots[:, None], WIDTH, axis=1)
        levels: list[np.ndarray] = []
        for level in range(LENGTH):
            if level:
                paths = levels[-1].reshape(count, -1)[:, self._parents[level]]
            levels.append((_usual(paths)[..., None] + 37 * np.arange(CANDIDATES, dtype=np.int32)) % WORDS)
        return DraftCandidates(
            np.stack(levels, axis=1),
            np.tile(self._log_probs, (count, 1, 1, 1)),
            np.tile(self._parents, (count, 1, 1)),
        )

    @staticmethod
    def _next(batch: TargetBatch) -> np.ndarray:
        tokens, positions = batch.input_ids[batch.logit_rows], batch.positions[batch.logit_rows]
        mixed = (tokens.astype(np.int64) * 2654435761 + positions * np.int64(40503)) >> 7
        return np.where(mixed % 10 < 7, _usual(tokens), mixed % WORDS).astype(np.int32)


class NullBudgets(BudgetController):
    """A controller that is told of steps as long as `TARGET_S`, whatever they took."""

    def __init__(self, most_rows: int):
        """`most_rows` of a step."""
        rows = [2**power for power in range(most_rows.bit_length())]
        table = TimeTable(sequences=most_rows, rows=rows, seconds=[TARGET_S] * len(rows), padded=False)
        super().__init__(Estimates(costs=StepCosts(tables=[table])))

    def end(
        self,
        methods: Sequence[str],
        bands: Sequence[int],
        tree: TokenTree,
        accepted: Sequence[int],
        step_s: float,
        target_s: float,
    ) -> None:
        """See `BudgetController.end`."""
        super().end(methods, bands, tree, accepted, TARGET_S, TARGET_S)


def _usual(tokens: np.ndarray) -> np.ndarray:
    """The token that usually follows: each after another, until all have come."""
    return (tokens * 6 + 1) % WORDS


def _search() -> tuple[np.ndarray, np.ndarray]:
    """A beam search's cumulative log-probabilities float32 [L, W, K] and parents int32 [L, W] (`DraftCandidates`)."""
    log_probs, parents = np.full((LENGTH, WIDTH, CANDIDATES), -np.inf), np.zeros((LENGTH, WIDTH), np.int32)
    log_probs[0, 0] = np.log(CHANCES)
    for level in range(1, LENGTH):
        before = log_probs[level - 1].reshape(-1)
        parents[level] = np.argsort(-before, kind="stable")[:WIDTH]
        log_probs[level] = before[parents[level], None] + np.log(CHANCES)
    return log_probs.astype(np.float32), parents


def measure(
    method: str,
    streams: int,
    nodes: int,
    vocab_size: int,
    logits: bool,
    steps: int,
    target_s: float = 0.0,
    overlap: bool = False,
    served_tokens: int = 0,
) -> Overhead:
    """The scheduler's time in `steps` steps of `streams` streams, with trees of `nodes` nodes if the method drafts. The
    target takes `target_s`; with `overlap` what the host does meanwhile is not counted."""
    plans = {
        BEST_FIRST: MethodConfig(construction="best_first", tree_budget=nodes),
        WITH_NGRAMS: MethodConfig(construction="best_first", ngram=True, tree_budget=nodes),
    }
    limits = Limits(streams, INT32_MAX, max_tree=nodes + 1, prefill_chunk=streams * PROMPT)
    most_rows = streams * max(nodes + 1, PROMPT)
    engine = NullEngine(most_rows, vocab_size, logits, target_s, overlap)
    scheduler = Scheduler(engine, limits, plans, budgets=NullBudgets(most_rows), texts=_texts(served_tokens))
    codec = _codec(vocab_size)
    for number in range(streams):
        prompt = [(number * 17 + position * position) % WORDS for position in range(PROMPT)]
        request = GenerateRequest(
            id=str(number), input_ids=prompt, max_tokens=INT32_MAX, stream=True, method=method, end_id=-1
        )
        scheduler.submit(RequestState(number, request, prompt, codec, frozenset(), stream_interval_s=STREAM_INTERVAL_S))
    discard = deque[Output](maxlen=0).extend
    for _ in range(WARM_UP):
        scheduler.step_and_send(discard)
    totals, outside = scheduler.totals, []
    tokens, rows = totals.output_tokens, totals.rows_executed
    for _ in range(steps):
        started = time.thread_time() - engine.spent_s
        scheduler.step_and_send(discard)
        outside.append(time.thread_time() - engine.spent_s - started)
    each = streams * steps
    return Overhead(
        method,
        streams,
        1e3 * float(np.mean(outside)),
        (totals.output_tokens - tokens) / each,
        (totals.rows_executed - rows) / each,
    )


def _texts(count: int) -> ServedTexts | None:
    """So many tokens of texts that the null target could have written; None for 0."""
    if not count:
        return None
    texts = ServedTexts(TextOptions(by_key=True, capacity=count))
    scope = texts.scopes.of(GenerateRequest(id="served", input_ids=[0], max_tokens=1))
    rng = np.random.default_rng(0)
    for _ in range(count // SERVED_LENGTH):
        text = rng.integers(0, WORDS, SERVED_LENGTH).astype(np.int32)
        for place in range(1, SERVED_LENGTH):
            if rng.random() < 0.7:
                text[place] = _usual(text[place - 1])
        texts.store.add(scope, text)
    return texts


def _codec(vocab_size: int) -> TextCodec:
    """A byte-level tokenizer of made-up words."""
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġw{token}": token for token in range(vocab_size)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


def table(figures: Sequence[Overhead], nodes: int) -> Table:
    """Streams down, methods across: milliseconds (tokens per step of a stream)."""
    cells = {(figure.streams, figure.method): figure for figure in figures}
    methods = list(dict.fromkeys(figure.method for figure in figures))
    result = Table(f"Host: ms per step (tokens per step of a stream), trees of {nodes} nodes", ["streams", *methods])
    for streams in dict.fromkeys(figure.streams for figure in figures):
        row = [cells[streams, method] for method in methods]
        result.rows.append([str(streams), *(f"{cell.mean_ms:.2f} ({cell.tokens_per_step:.2f})" for cell in row)])
    return result


def main(
    streams: Concurrency = [1, 8, 32, 64],
    methods: Annotated[list[str], typer.Option("--method", metavar="NAME", help="Methods to measure.")] = list(METHODS),
    nodes: Annotated[int, typer.Option("--tree-budget", min=1, help="Nodes of a draft tree, root excluded.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each figure.")] = 200,
    vocabulary: Annotated[int, typer.Option(min=WORDS, help="Tokens of the vocabulary.")] = 49152,
    logits: Annotated[bool, typer.Option("--logits", help="The host chooses from logits, as on a CPU.")] = False,
    target_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that the target takes.")] = 0,
    overlap: Annotated[bool, typer.Option("--overlap", help="The host works while the target executes.")] = False,
    served_tokens: Annotated[int, typer.Option(min=0, help="Tokens of served texts that join the n-grams.")] = 0,
    output: Report = Path("artifacts/reports/host_overhead.json"),
) -> None:
    if unknown := {*methods} - {*METHODS}:
        raise typer.BadParameter(f"--method {', '.join(unknown)}: expected some of {', '.join(METHODS)}")
    target = target_ms / 1e3, overlap, served_tokens
    figures = [
        measure(method, count, nodes, vocabulary, logits, steps, *target) for count in streams for method in methods
    ]
    setting = {"nodes": nodes, "vocabulary": vocabulary, "logits": logits, "steps": steps}
    time_of_steps = {"target_ms": target_ms, "overlap": overlap, "served_tokens": served_tokens}
    finish(output, setting | time_of_steps | {"figures": [asdict(figure) for figure in figures]}, table(figures, nodes))


if __name__ == "__main__":
    run(main)
