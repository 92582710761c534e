"""The fit of a method's scores on a runtime."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.compiler.tuning.scores import (
    DraftLog,
    Guess,
    LoggedEngine,
    Visited,
    fit_chances,
    fit_joint_odds,
    fit_ngram_odds,
    fit_sharpness,
    fit_slope,
    guesses,
    matches,
    visited,
)
from redraft.decoding.scores import UNFITTED, NgramScores, Scores, scores_at
from redraft.engines.api import Engine
from redraft.request import GenerateRequest, SamplingConfig
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Scheduler

LEAST_STEPS = 32
"""Steps of sequences that a measurement on prompts makes, also where its time is over."""


def seed_of(prompt: Sequence[int]) -> int:
    """A seed of the prompt's own: with one seed for all, all would share their noise."""
    return zlib.crc32(np.array(prompt, np.int32).tobytes())


@dataclass
class Bench:
    """One method of an idle runtime, to be fitted by itself."""

    runtime: Runtime
    method: str
    prompts: Sequence[list[int]]
    """Token ids, of chats where the bundle has a template."""
    tokens: int
    """Tokens to generate after each prompt."""
    nodes: int = 15
    """Drafted nodes of a step."""
    scores: tuple[Scores, ...] = UNFITTED
    """How drafted nodes are scored."""
    ngrams: NgramScores = field(default_factory=NgramScores)
    """How n-gram guesses are scored."""
    guessed: list[tuple[Guess, float]] = field(default_factory=list)
    """The guesses of sampled answers, each with the factor that was fitted to their odds."""
    ends: float = math.inf
    """When measurements end that are under way, by `time.monotonic`: with fewer steps then."""

    @property
    def slots(self) -> int:
        """Most sequences at a time."""
        return self.runtime.limits.slots

    @property
    def _joint(self) -> tuple[float, float]:
        """The factors by which guesses and the drafter's scores are joined."""
        drafter = self.runtime.engine.drafters.get(self.method)
        return self.ngrams.joint(drafter is not None and drafter.reads_context)

    def unfitted(self) -> Bench:
        """The same method as it is served before it was fitted."""
        return replace(self, scores=UNFITTED, ngrams=NgramScores())

    def tokens_per_step(self, temperature: float) -> float:
        """Tokens that a step of a sequence gains in the answers to all prompts."""
        self._schedule(self.runtime.engine)
        for _ in self._answer(temperature):
            pass
        totals = self.runtime.scheduler.totals
        return 1 + totals.accepted / max(totals.sequence_steps, 1)

    def fit_chances(self) -> None:
        """Fit the chances of n-gram guesses to greedy answers to all prompts."""
        self._schedule(self.runtime.engine)
        answers = self._answer(0.0)
        seen = [match for index, ids in answers for match in matches(self.prompts[index], ids)]
        self.ngrams = self.ngrams.model_copy(update={"chances": fit_chances(seen)})

    def fit_joint_odds(self) -> None:
        """Fit how guesses and the drafter's scores are joined, to the guesses of the temperatures that were fitted."""
        if joint := fit_joint_odds(self.guessed):
            self.ngrams = self.ngrams.model_copy(update={"joint_odds": joint})

    def fit(self, temperature: float) -> None:
        """Fit the scores of a temperature's nodes to the answers to all prompts: first the slope, which decides what is
        drafted, then the others to what is drafted with it."""
        support = self.runtime.methods[self.method].support
        nodes, guessed = self._visited(temperature)
        before = scores_at(self.scores, temperature)
        if (slope := fit_slope(nodes, before, temperature)) not in (None, before.slope):
            self._score(temperature, slope=slope)
            nodes, guessed = self._visited(temperature)
        sharpness = fit_sharpness([node for node, _ in nodes], before.sharpness, support)
        odds = fit_ngram_odds(guessed, self._joint)
        self._score(temperature, sharpness=sharpness, ngram_odds=odds)
        self.guessed += [(guess, scores_at(self.scores, temperature).ngram_odds) for guess in guessed]

    def _score(self, temperature: float, **fitted: float | None) -> None:
        """Score a temperature's nodes with what was fitted from now on; None leaves a number as it is."""
        values = {name: value for name, value in fitted.items() if value is not None}
        before = scores_at(self.scores, temperature)
        after = before.model_copy(update={"temperature": temperature, **values})
        self.scores = (*(score for score in self.scores if score.temperature != temperature), after)

    def _visited(self, temperature: float) -> tuple[list[tuple[Visited, np.ndarray]], list[Guess]]:
        """The drafted nodes that the answers to all prompts went through, each with its candidates' noise, and the
        n-gram guesses there."""
        log, plan = DraftLog(), self._plan
        self._schedule(LoggedEngine(self.runtime.engine, log))
        nodes: list[tuple[Visited, np.ndarray]] = []
        guessed: list[Guess] = []
        for index, ids in self._answer(temperature):
            prompt, seed = self.prompts[index], seed_of(self.prompts[index])
            drafts = log.drafts.get(seed, {})
            if plan.shares_noise:
                nodes += [
                    (node, node.noise(seed, start))
                    for start, drafted in drafts.items()
                    for node in visited(drafted, ids[start:])
                ]
            if plan.ngram:
                guessed += guesses(prompt, ids, drafts, self.ngrams.chances)
        return nodes, guessed

    def _schedule(self, engine: Engine) -> None:
        """Let the runtime answer by the method as it is fitted now."""
        self.runtime.scheduler = Scheduler(
            engine,
            self.runtime.limits,
            {self.method: self._plan},
            self.runtime.bigrams,
            prefix_reuse=self.runtime.prefix_reuse,
        )

    @property
    def _plan(self) -> MethodConfig:
        """The method with the scores of now."""
        return self.runtime.methods[self.method].changed(
            scores=self.scores, ngram_scores=self.ngrams, budget=BudgetTable.constant(self.nodes)
        )

    def _answer(self, temperature: float) -> Iterator[tuple[int, list[int]]]:
        """The tokens that follow each prompt, with its place, as many prompts at a time as there are slots: fewer
        tokens, or none, where the time is over."""
        scheduler = self.runtime.scheduler
        waiting = list(enumerate(self.prompts))
        while waiting or not scheduler.idle:
            if time.monotonic() > self.ends and scheduler.totals.sequence_steps >= LEAST_STEPS:
                waiting.clear()
                for index in range(len(self.prompts)):
                    scheduler.cancel(index)
            while waiting and self._load() < self.slots:
                index, prompt = waiting.pop(0)
                sampling = SamplingConfig(temperature=temperature, seed=seed_of(prompt))
                request = GenerateRequest(
                    id=str(index), input_ids=prompt, max_tokens=self.tokens, sampling=sampling, method=self.method
                )
                scheduler.submit(self.runtime.sequence(index, request))
            for output in scheduler.step():
                if output.finish_reason:
                    yield int(output.key), output.token_ids  # type: ignore[call-overload]

    def _load(self) -> int:
        status = self.runtime.scheduler.status()
        return status.running + status.waiting
