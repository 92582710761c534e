"""Measurements on a runtime: acceptance of a method's drafts, and times of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from compiler.tuning.acceptance import Acceptance
from compiler.tuning.choice import Cell, StepTimes
from redraft.bundle.budget import BudgetTable
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.method import MethodPlan
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, SamplingConfig
from redraft.runtime import Runtime

MODES = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=1.0, seed=1)}
"""Sampling of the requests that each half of a budget table is for."""
GREEDY = MODES["greedy"]
MOST_SLOWER = 3.0
"""Larger budgets are not timed once a step takes so many times as long as one without drafts: no acceptance pays it."""


class Shape(NamedTuple):
    """A tree shape: construction and n-gram branch."""

    construction: str | None
    ngram: bool

    def __str__(self) -> str:
        return " + ".join([*([self.construction] if self.construction else []), *(["n-gram"] if self.ngram else [])])


@dataclass
class Bench:
    """One method of an idle runtime, to be measured by itself on texts that a chat template was applied to."""

    runtime: Runtime
    method: str
    prompts: Sequence[str]
    tokens: int
    """Tokens to generate after each prompt."""
    served: list[list[int]] = field(default_factory=list)
    """Token sequences that a method that drafts from traffic has served before."""

    @property
    def slots(self) -> int:
        """Most sequences at a time."""
        return self.runtime.limits.slots

    def serve(self, others: Sequence[str]) -> None:
        """Answer other prompts, for the method to draft from."""
        codec = self.runtime.codec
        self.runtime.with_plans({})
        texts = {place: codec.encode(text) for place, text in enumerate(others)}
        for place, ids in self._answer(others, GREEDY, AUTO_REGRESSIVE):
            texts[place] = texts[place] + ids
        self.served = list(texts.values())

    def acceptance(self, shape: Shape, mode: str, budget: int, found: Acceptance, prompts: Sequence[str]) -> None:
        """Add to `found` the steps that answer some prompts with trees of `budget` nodes."""
        self._draft(shape, BudgetTable.constant(budget), found.observe)
        for _ in self._answer(prompts, MODES[mode], self.method):
            pass

    def step_times(self, shape: Shape, running: int, budgets: Sequence[int], rounds: int, times: StepTimes) -> None:
        """Add whole steps of so many sequences with each budget, interleaved so that a busy moment of the machine hits
        all alike. Each is timed after one like it. `budgets` begin with 0."""
        table = BudgetTable.constant(0)
        self._draft(shape, table)
        scheduler, joined = self.runtime.scheduler, 0
        totals = scheduler.totals
        for _ in range(rounds):
            for budget in budgets:
                table.entries[0].greedy = budget
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
        for place in range(joined):
            scheduler.cancel(f"s{place}")
        scheduler.step()

    def mean_step(self, shape: Shape, prompts: Sequence[str], mode: str, cell: Cell, tokens: int) -> float:
        """Mean seconds of the steps in which all prompts are answered together, about `tokens` each, with one cut of
        the trees. Nothing is drafted until all prompts are prefilled, so that none ends before."""
        table = BudgetTable.constant(0)
        entry = table.entries[0]
        self._draft(shape, table)
        scheduler = self.runtime.scheduler
        rows = sum(len(self.runtime.codec.encode(prompt)) for prompt in prompts)
        waited = rows // self.runtime.limits.prefill_chunk + len(prompts)
        for place, prompt in enumerate(prompts):
            self._join(place, prompt, waited + tokens + 1, MODES[mode])
        while scheduler.prefilling:
            scheduler.step()
        entry.greedy = entry.sampled = cell.nodes
        entry.greedy_chance = entry.sampled_chance = cell.chance
        steps, seconds = scheduler.totals.steps, scheduler.totals.step_s
        while self._load() == len(prompts) and scheduler.totals.steps - steps < tokens:
            scheduler.step()
        mean = (scheduler.totals.step_s - seconds) / max(scheduler.totals.steps - steps, 1)
        for place in range(len(prompts)):
            scheduler.cancel(f"s{place}")
        while not scheduler.idle:
            scheduler.step()
        return mean

    def _draft(
        self,
        shape: Shape,
        budget: BudgetTable,
        observe: Callable[[TokenTree, int, Verdict], None] | None = None,
    ) -> None:
        plan: MethodPlan = replace(self.runtime.plans[self.method], **shape._asdict(), budget=budget)
        self.runtime.with_plans({self.method: plan}, observe, self.served)

    def _answer(self, prompts: Sequence[str], sampling: SamplingConfig, method: str) -> Iterator[tuple[int, list[int]]]:
        """The tokens that follow each prompt, with its place, as many prompts at a time as there are slots."""
        scheduler = self.runtime.scheduler
        waiting = list(enumerate(prompts))
        while waiting or not scheduler.idle:
            while waiting and self._load() < self.slots:
                place, text = waiting.pop(0)
                request = GenerateRequest(
                    id=str(place), text=text, max_tokens=self.tokens, sampling=sampling, method=method
                )
                scheduler.submit(self.runtime.sequence(place, request))
            for output in scheduler.step():
                if output.finish_reason:
                    yield int(output.key), output.token_ids  # type: ignore[call-overload]

    def _join(self, place: int, prompt: str, tokens: int | None = None, sampling: SamplingConfig = GREEDY) -> None:
        """One more sequence, which ends after so many tokens, or with the context."""
        most = self.runtime.limits.max_len
        ids = self.runtime.codec.encode(prompt)[: most // 2]
        count = min(tokens or most, most - len(ids) - 1)
        request = GenerateRequest(id=f"s{place}", input_ids=ids, max_tokens=count, end_id=-1, sampling=sampling)
        self.runtime.scheduler.submit(self.runtime.sequence(request.id, request))

    def _load(self) -> int:
        status = self.runtime.scheduler.status()
        return status.running + status.waiting
