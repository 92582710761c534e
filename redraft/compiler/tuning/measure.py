"""Measurements on a runtime: acceptance of a method's drafts, the fit of their scores, and times of whole steps."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from redraft.batch import step_rows
from redraft.bundle.budget_table import UNFITTED, BudgetTable, Scores
from redraft.bundle.method import MethodConfig
from redraft.compiler.tuning.acceptance import Acceptance
from redraft.compiler.tuning.choice import Cell, StepTimes
from redraft.compiler.tuning.scores import (
    DraftLog,
    Guess,
    LoggedEngine,
    Visited,
    fit_ngram_odds,
    fit_sharpness,
    fit_slope,
    guesses,
    retrieved,
    visited,
)
from redraft.decoding.retrieval import Retrieval, RetrievalText
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, SamplingConfig
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Scheduler

GREEDY = SamplingConfig()
MOST_SLOWER = 3.0
"""Larger budgets are not timed once a step takes so many times as long as one without drafts: no acceptance pays it."""

LEAST_STEPS = 32
"""Steps of sequences that a measurement on prompts makes, also where its time is over."""


class TreeShape(NamedTuple):
    """A tree shape: construction and n-gram branch."""

    construction: str | None
    ngram: bool

    def __str__(self) -> str:
        return " + ".join([*([self.construction] if self.construction else []), *(["n-gram"] if self.ngram else [])])


def seed_of(prompt: Sequence[int]) -> int:
    """A seed of the prompt's own: with one seed for all, all would share their noise."""
    return zlib.crc32(np.array(prompt, np.int32).tobytes())


@dataclass
class Bench:
    """One method of an idle runtime, to be measured by itself."""

    runtime: Runtime
    method: str
    prompts: Sequence[list[int]]
    """Token ids, of chats where the bundle has a template."""
    tokens: int
    """Tokens to generate after each prompt."""
    served: list[list[int]] = field(default_factory=list)
    """Token sequences that a method that drafts from traffic has served before."""
    scores: tuple[Scores, ...] = UNFITTED
    """How drafted nodes are scored."""
    ends: float = math.inf
    """When measurements end that are under way, by `time.monotonic`: with fewer steps then."""

    @property
    def slots(self) -> int:
        """Most sequences at a time."""
        return self.runtime.limits.slots

    def serve(self, others: Sequence[list[int]]) -> None:
        """Answer other prompts, for the method to draft from."""
        self.runtime.with_methods({})
        texts = dict(enumerate(others))
        for index, ids in self._answer(others, 0.0, AUTO_REGRESSIVE):
            texts[index] = texts[index] + ids
        self.served = list(texts.values())

    def acceptance(
        self, shape: TreeShape, temperature: float, budget: int, found: Acceptance, prompts: Sequence[list[int]]
    ) -> None:
        """Add to `found` the steps that answer some prompts with trees of `budget` nodes."""
        self._draft(shape, self._constant(budget), found.observe)
        for _ in self._answer(prompts, temperature, self.method):
            pass

    def fit(self, shape: TreeShape, temperature: float, budget: int) -> None:
        """Fit the scores of a temperature's nodes to the answers to all prompts: first the slope, which decides what is
        drafted, then the others to what is drafted with it."""
        support = self.runtime.methods[self.method].support
        drafter = self.runtime.engine.drafters.get(self.method)
        nodes, guessed = self._visited(shape, temperature, budget)
        before = self._constant(budget).scores_at(temperature)
        if (slope := fit_slope(nodes, before, temperature)) not in (None, before.slope):
            self._score(temperature, slope=slope)
            nodes, guessed = self._visited(shape, temperature, budget)
        sharpness = fit_sharpness([node for node, _ in nodes], before.sharpness, support)
        odds = fit_ngram_odds(guessed, drafter is not None and drafter.reads_context)
        self._score(temperature, sharpness=sharpness, ngram_odds=odds)

    def _score(self, temperature: float, **fitted: float | None) -> None:
        """Score a temperature's nodes with what was fitted from now on; None leaves a number as it is."""
        values = {name: value for name, value in fitted.items() if value is not None}
        before = self._constant(0).scores_at(temperature)
        after = before.model_copy(update={"temperature": temperature, **values})
        self.scores = (*(score for score in self.scores if score.temperature != temperature), after)

    def _visited(
        self, shape: TreeShape, temperature: float, budget: int
    ) -> tuple[list[tuple[Visited, np.ndarray]], list[Guess]]:
        """The drafted nodes that the answers to all prompts went through, each with its candidates' noise, and the
        n-gram guesses there."""
        log, runtime = DraftLog(), self.runtime
        plan, engine = self._method_with(shape, self._constant(budget)), LoggedEngine(runtime.engine, log)
        runtime.scheduler = Scheduler(
            engine,
            runtime.limits,
            {self.method: plan},
            runtime.bigrams,
            served=self.served,
            prefix_reuse=runtime.prefix_reuse,
        )
        memory = Retrieval.of(self.served)
        nodes: list[tuple[Visited, np.ndarray]] = []
        guessed: list[Guess] = []
        for index, ids in self._answer(self.prompts, temperature, self.method):
            prompt, seed = self.prompts[index], seed_of(self.prompts[index])
            drafts = log.drafts.get(seed, {})
            if plan.shares_noise:
                nodes += [
                    (node, node.noise(seed, start))
                    for start, drafted in drafts.items()
                    for node in visited(drafted, ids[start:])
                ]
            if plan.retrieves:
                guessed += retrieved(RetrievalText(memory, prompt, plan.ngram), ids)
            elif plan.ngram:
                guessed += guesses(prompt, ids, drafts)
        return nodes, guessed

    def step_times(self, shape: TreeShape, running: int, budgets: Sequence[int], rounds: int, times: StepTimes) -> None:
        """Add whole steps of so many sequences with each budget, interleaved so that a busy moment of the machine hits
        all alike. Each is timed after one like it. `budgets` begin with 0."""
        table = self._constant(0)
        self._draft(shape, table)
        scheduler, joined = self.runtime.scheduler, 0
        totals = scheduler.totals
        for done in range(rounds):
            if done and time.monotonic() > self.ends:
                break
            for budget in budgets:
                table.entries[0].nodes = budget
                while self._load() < running:
                    self._join(joined, self.prompts[joined % len(self.prompts)])
                    joined += 1
                while scheduler.prefilling:
                    scheduler.step()
                scheduler.step()
                rows, seconds = totals.rows_executed, totals.step_s
                scheduler.step()
                times.add(budget, totals.rows_executed - rows, totals.step_s - seconds)
                if times.fastest(budget) > MOST_SLOWER * times.plain:
                    break
        for index in range(joined):
            scheduler.cancel(f"s{index}")
        scheduler.step()

    def mean_step(
        self, shape: TreeShape, prompts: Sequence[list[int]], temperature: float, cell: Cell, tokens: int
    ) -> float:
        """Mean seconds of the steps in which all prompts are answered together, about `tokens` each, with one cut of
        the trees. Nothing is drafted until all prompts are prefilled, so that none ends before. 0 where the context is
        too short for that."""
        table = self._constant(0)
        entry = table.entries[0]
        self._draft(shape, table)
        scheduler = self.runtime.scheduler
        rows = sum(map(len, prompts))
        waited = rows // step_rows(self.runtime.limits.prefill_chunk, 1) + len(prompts)
        for index, prompt in enumerate(prompts):
            self._join(index, prompt, waited + tokens + 1, SamplingConfig(temperature=temperature, seed=index))
        while scheduler.prefilling:
            scheduler.step()
        entry.nodes, entry.chance = cell.nodes, cell.chance
        steps, seconds = scheduler.totals.steps, scheduler.totals.step_s
        while self._load() == len(prompts) and scheduler.totals.steps - steps < tokens:
            scheduler.step()
        mean = (scheduler.totals.step_s - seconds) / max(scheduler.totals.steps - steps, 1)
        for index in range(len(prompts)):
            scheduler.cancel(f"s{index}")
        while not scheduler.idle:
            scheduler.step()
        return mean

    def _draft(
        self,
        shape: TreeShape,
        budget: BudgetTable,
        observe: Callable[[TokenTree, int, Verdict], None] | None = None,
    ) -> None:
        self.runtime.with_methods({self.method: self._method_with(shape, budget)}, observe, self.served)

    def _method_with(self, shape: TreeShape, budget: BudgetTable) -> MethodConfig:
        return self.runtime.methods[self.method].changed(**shape._asdict(), budget=budget)

    def _constant(self, budget: int) -> BudgetTable:
        return BudgetTable.constant(budget).model_copy(update={"scores": self.scores})

    def _answer(self, prompts: Sequence[list[int]], temperature: float, method: str) -> Iterator[tuple[int, list[int]]]:
        """The tokens that follow each prompt, with its place, as many prompts at a time as there are slots: fewer
        tokens, or none, where the time is over."""
        scheduler = self.runtime.scheduler
        waiting = list(enumerate(prompts))
        while waiting or not scheduler.idle:
            if time.monotonic() > self.ends and scheduler.totals.sequence_steps >= LEAST_STEPS:
                waiting.clear()
                for index in range(len(prompts)):
                    scheduler.cancel(index)
            while waiting and self._load() < self.slots:
                index, prompt = waiting.pop(0)
                sampling = SamplingConfig(temperature=temperature, seed=seed_of(prompt))
                request = GenerateRequest(
                    id=str(index), input_ids=prompt, max_tokens=self.tokens, sampling=sampling, method=method
                )
                scheduler.submit(self.runtime.sequence(index, request))
            for output in scheduler.step():
                if output.finish_reason:
                    yield int(output.key), output.token_ids  # type: ignore[call-overload]

    def _join(
        self, index: int, prompt: list[int], tokens: int | None = None, sampling: SamplingConfig = GREEDY
    ) -> None:
        """One more sequence, which ends after so many tokens, or with the context."""
        most = self.runtime.limits.max_len
        ids = prompt[: most // 2]
        count = min(tokens or most, most - len(ids) - 1)
        request = GenerateRequest(id=f"s{index}", input_ids=ids, max_tokens=count, end_id=-1, sampling=sampling)
        self.runtime.scheduler.submit(self.runtime.sequence(request.id, request))

    def _load(self) -> int:
        status = self.runtime.scheduler.status()
        return status.running + status.waiting
