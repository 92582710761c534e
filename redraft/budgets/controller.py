"""The budgets of a scheduler's steps: whether to draft, how many nodes to verify, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from redraft.budgets.choice import Choice, Terms
from redraft.budgets.cost import MOST_APART, RATE, STRICT, ShapeCosts, StepCosts, StepShape
from redraft.budgets.gain import Calibration
from redraft.decoding.token_tree import TokenTree
from redraft.request import AUTO_REGRESSIVE

ALLOWED_LOSS = 0.01
"""The most time, as a share of all, that drafts may lose against plain decoding."""
LEAST_GAIN = 0.02
"""How much faster than plain decoding, as a share, drafts should make steps: times are not known better than so."""
PLAIN_EVERY = 100
"""Steps with drafts at a load after which one does without: what plain decoding costs shows only where it is done."""
FIRST_PLAIN = 3
"""First steps at a load, which do without for the same reason: the engine may have been timed on a busy machine."""
CREDIT_S = 0.1
"""Most seconds that the ledger holds: what is lost at once when predictable text ends."""
MOST_UNASKED = 4
"""Most steps without drafts between two that learn from what they took: to ask and to learn takes a fiftieth of a short
step, which is what may not be lost."""
FIRST_CREDIT = 3
"""Plain steps of one stream whose time the ledger begins with: what a first answer may lose."""
GUESSING = ", guessing"
"""Follows a method's name where its steps are known that only guess."""


@pydantic_dataclass(config=STRICT, kw_only=True)
class History:
    """What a method's last drafts at some load were, as running means."""

    promised: float
    """Sum of the uncorrected chances of the nodes that were chosen, per token of a step without them."""
    slower: float
    """Expected seconds of the step with the drafts over those without."""

    def advantage(self, ratio: float) -> float:
        """How much faster than without them, as a share, steps with such drafts are where chances are corrected by
        this factor."""
        return (1 + ratio * self.promised) / self.slower - 1

    def add(self, promised: float, slower: float) -> None:
        """Count a draft."""
        self.promised += RATE * (promised - self.promised)
        self.slower += RATE * (slower - self.slower)


class Estimates(BaseModel):
    """All that a scheduler learns of its engine and its traffic."""

    model_config = STRICT

    costs: StepCosts
    calibrations: dict[str, Calibration] = Field(default_factory=dict)
    """By method."""
    histories: dict[str, History] = Field(default_factory=dict)
    """By method, load and temperature band."""


@dataclass
class Drafts:
    """What a method verifies in a step."""

    nodes: int = 0
    expected: float = 0.0
    """Nodes of these that should be accepted."""


@dataclass
class ChosenDrafts(Drafts):
    """What a method verifies whose nodes are chosen."""

    bands: Sequence[int] = ()
    """Of the sequences that it drafts for."""
    probes: bool = False
    """Whether it is not expected to pay, and drafts to see whether that is still right."""
    guesses: bool = False
    """Whether it drafts n-grams' guesses only, without its drafter."""


@dataclass
class Step:
    """A step on its way."""

    shape: StepShape
    costs: ShapeCosts
    plain: bool
    """Whether nothing may be drafted, to see what that costs."""
    plain_rows: int
    """Rows that pass whatever is chosen: a root of each sequence, the prompts', and nodes of fixed budgets."""
    rows: int
    """Rows known so far."""
    tokens: float
    """Expected tokens so far."""
    fixed: dict[str, Drafts] = field(default_factory=dict)
    """By method that drafts whatever pays."""
    drafts: dict[str, ChosenDrafts] = field(default_factory=dict)
    """By method that asked, and drafts."""
    unasked: float = math.inf
    """For how many more steps all methods that asked would be told not to draft."""

    @property
    def expected(self) -> dict[str, float]:
        """Nodes that should be accepted, by method that drafts."""
        return {method: drafts.expected for method, drafts in (self.fixed | self.drafts).items()}

    def drafting(self, *others: str) -> str:
        """The methods that draft, and others, as a key of the step's costs; those that only guess have their own."""
        chosen = (method + GUESSING * drafts.guesses for method, drafts in self.drafts.items())
        return "+".join(sorted({*self.fixed, *chosen, *others}))

    @property
    def plain_s(self) -> float:
        """Seconds of the step without what is chosen."""
        return self.costs.step(self.plain_rows, "+".join(sorted(self.fixed)))


class BudgetController:
    """Decides for each step, in this order: `begin`; `include` for each method with a fixed budget; for each other one
    `pays`, and if so `terms` and `take`; `end`.

    A ledger keeps the promise that drafts are never slower than plain decoding, whatever the estimates say: it is
    credited with ALLOWED_LOSS of the time, debited with what each step with drafts lost, and paid back what it won. On
    an empty one nothing is drafted. A full one pays for probes of what is not expected to pay.

    While the ledger saves for a probe, the same sequences may take `unasked` steps without drafts that nothing is asked
    of: `note_unasked` is all that is done for each.
    """

    def __init__(self, estimates: Estimates):
        self.estimates = estimates
        self.balance_s = min(FIRST_CREDIT * estimates.costs.of(StepShape(1)).target(1), CREDIT_S)
        self._since_plain: dict[str, int] = {}
        """Steps with drafts since the last one without, by load; below 0: first steps that are left."""
        self.unasked = 0
        """Steps without drafts, prompts and questions that may follow for the same sequences."""
        self.held_back = 0
        """Methods' drafts, one a step, that should have paid and that the ledger did not allow."""
        self.begin(StepShape(0))

    @property
    def costs(self) -> StepCosts:
        """The cost model."""
        return self.estimates.costs

    def of(self, method: str) -> MethodBudgets:
        """The budgets of one method."""
        return MethodBudgets(self, method)

    def begin(self, shape: StepShape) -> None:
        """Begin a step."""
        costs = self.costs.of(shape)
        since = self._since_plain.get(costs.load, -FIRST_PLAIN)
        plain, rows = not 0 <= since < PLAIN_EVERY, shape.running + shape.prompt_rows
        self.step = Step(shape, costs, plain, rows, rows, shape.running)

    def include(self, method: str, bands: Sequence[int], tree: TokenTree) -> None:
        """Count the trees of a method with a fixed budget, for sequences of these bands."""
        if method != AUTO_REGRESSIVE:
            self.step.unasked = 0
        if nodes := len(tree.tokens) - len(tree):
            step, ratios = self.step, self._calibration(method).ratios(bands)
            expected = sum(ratio * count for ratio, count in zip(ratios, tree.promises, strict=True))
            step.fixed[method] = Drafts(nodes, expected)
            step.plain_rows += nodes
            step.rows += nodes
            step.tokens += expected

    def pays(self, method: str, bands: Sequence[int]) -> bool:
        """Whether the method should draft for its sequences, of these bands: whether its last drafts at this load made
        steps faster, or a probe is due."""
        step, longest, self.step.unasked = self.step, self.step.unasked, 0
        if step.plain:
            return False
        history = self.estimates.histories.get(self._key(method, bands))
        ratio = sum(self._calibration(method).ratios(bands)) / len(bands)
        should_pay = history is not None and history.advantage(ratio) >= LEAST_GAIN
        plain_s, needed_s = step.plain_s, 0.0
        if not should_pay:
            loss = step.costs.step(step.rows + len(bands), step.drafting(method)) - plain_s
            needed_s = min(max(loss, 0.0), CREDIT_S)
        if self.balance_s <= 0 or self.balance_s < needed_s:
            self.held_back += should_pay
            step.unasked = min(longest, (needed_s - self.balance_s) / (ALLOWED_LOSS * plain_s))
            return False
        step.drafts[method] = ChosenDrafts(bands=bands, probes=not should_pay)
        return True

    def terms(self, method: str, beside: int = 0) -> Terms:
        """What the nodes of the method's trees are chosen by, where `beside` them so many others of the method are
        verified whatever is chosen."""
        step, drafts = self.step, self.step.drafts[method]
        times = step.costs.by_nodes(step.rows + beside, step.drafting())
        ratios = self._calibration(method).ratios(drafts.bands)
        return Terms(ratios, step.tokens, times, drafts.probes)

    def guess_terms(self, method: str) -> Terms:
        """What n-grams' guesses are chosen by, where the method does without its drafter."""
        self.step.drafts[method].guesses = True
        return self.terms(method)._replace(probes=False)

    def guesses_suffice(self, method: str, choice: Choice) -> bool:
        """Whether the guesses that were chosen by `guess_terms` make the step faster than the method's last drafts at
        this load made theirs. Else its drafter is called."""
        step = self.step
        drafts = step.drafts.pop(method)
        plain_s = step.costs.step(step.rows, step.drafting()) - step.costs.prompts_s
        step.drafts[method] = drafts
        history = self.estimates.histories.get(self._key(method, drafts.bands))
        ratio = sum(self._calibration(method).ratios(drafts.bands)) / len(drafts.bands)
        least = max(history.advantage(ratio) if history else 0.0, LEAST_GAIN)
        drafts.guesses = (1 + choice.expected / step.tokens) * plain_s / choice.seconds - 1 >= least
        return drafts.guesses

    def take(self, method: str, choice: Choice, beside: int = 0) -> None:
        """Verify the nodes that were chosen by `terms`, and `beside` others."""
        step, costs = self.step, self.step.costs
        drafts = step.drafts.pop(method)
        before_s = costs.step(step.rows, step.drafting()) - costs.prompts_s
        if not drafts.guesses:
            self._remember(self._key(method, drafts.bands), choice.promised / step.tokens, choice.seconds / before_s)
        drafts.nodes, drafts.expected = sum(choice.counts) + beside, choice.expected
        step.drafts[method] = drafts
        step.rows += drafts.nodes
        step.tokens += drafts.expected

    def end(
        self,
        methods: Sequence[str],
        bands: Sequence[int],
        tree: TokenTree,
        accepted: Sequence[int],
        step_s: float,
        target_s: float,
    ) -> None:
        """Learn from the step: the method and the band of each sequence that decoded, the tree that was verified, how
        many of its nodes were accepted, and the seconds that the step took, of which `target_s` in the target."""
        step, shape, costs = self.step, self.step.shape, self.step.costs
        # As they were expected, before the step corrects them.
        plain_s, prompt_s = (step.plain_s, costs.prompts_s) if step.drafts else (0.0, 0.0)
        expected_s = costs.observe(len(tree.tokens) + shape.prompt_rows, step.drafting(), step_s, target_s)
        if step.drafts or step.fixed:
            self._calibrate(methods, bands, tree, accepted)
        self.balance_s += ALLOWED_LOSS * step_s
        if step.drafts:
            # What delays single steps is no loss of their drafts: plain steps are delayed as often, which the model
            # counts alike.
            taken = min(max(step_s, expected_s / MOST_APART), MOST_APART * expected_s)
            won = sum(compress(accepted, map(step.drafts.__contains__, methods)))
            # An accepted token saves its share of a step without what was chosen, prompts apart.
            tokens = shape.running + sum(accepted) - won
            self.balance_s += plain_s + (plain_s - prompt_s) * won / tokens - taken
        self.balance_s = min(self.balance_s, CREDIT_S)
        known = not shape.prompt_rows and step.unasked < math.inf
        self.unasked = int(min(step.unasked, MOST_UNASKED)) if known else 0
        since = self._since_plain.get(costs.load, -FIRST_PLAIN)
        self._since_plain[costs.load] = since + 1 if step.drafts or since < 0 else 0

    def note_unasked(self, step_s: float) -> None:
        """Count a step of `unasked`, which took `step_s`."""
        self.unasked -= 1
        self.balance_s = min(self.balance_s + ALLOWED_LOSS * step_s, CREDIT_S)

    def _calibrate(
        self, methods: Sequence[str], bands: Sequence[int], tree: TokenTree, accepted: Sequence[int]
    ) -> None:
        sums: dict[tuple[str, int], tuple[int, float, int]] = {}
        for kind, promised, count in zip(zip(methods, bands, strict=True), tree.promises, accepted, strict=True):
            if promised > 0:
                all_accepted, all_promised, drafts = sums.get(kind, (0, 0.0, 0))
                sums[kind] = all_accepted + count, all_promised + promised, drafts + 1
        for (method, band), observed in sums.items():
            self._calibration(method).observe(band, *observed)

    def _calibration(self, method: str) -> Calibration:
        calibrations = self.estimates.calibrations
        if method not in calibrations:
            calibrations[method] = Calibration()
        return calibrations[method]

    def _key(self, method: str, bands: Sequence[int]) -> str:
        """What a history is kept by: the method, the load, and the band of most of its sequences."""
        return f"{method}:{self.step.costs.load}:{max(set(bands), key=bands.count)}"

    def _remember(self, key: str, promised: float, slower: float) -> None:
        if history := self.estimates.histories.get(key):
            history.add(promised, slower)
        else:
            self.estimates.histories[key] = History(promised=promised, slower=slower)


@dataclass(frozen=True)
class MethodBudgets:
    """One method's side of a controller."""

    controller: BudgetController
    method: str

    def pay(self, bands: Sequence[int]) -> bool:
        """See `BudgetController.pays`."""
        return self.controller.pays(self.method, bands)

    def terms(self, beside: int = 0) -> Terms:
        """See `BudgetController.terms`."""
        return self.controller.terms(self.method, beside)

    def guess_terms(self) -> Terms:
        """See `BudgetController.guess_terms`."""
        return self.controller.guess_terms(self.method)

    def guesses_suffice(self, choice: Choice) -> bool:
        """See `BudgetController.guesses_suffice`."""
        return self.controller.guesses_suffice(self.method, choice)

    def take(self, choice: Choice, beside: int = 0) -> None:
        """See `BudgetController.take`."""
        self.controller.take(self.method, choice, beside)
