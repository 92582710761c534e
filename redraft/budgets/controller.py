"""The budgets of a scheduler's steps: whether to draft, how many nodes to verify, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from redraft.budgets.choice import best_count
from redraft.budgets.cost import RATE, STRICT, StepCosts, StepShape
from redraft.budgets.gain import Calibration, bands_of
from redraft.decoding.token_tree import TokenTree

ALLOWED_LOSS = 0.01
"""The most time, as a share of all, that drafts may lose against plain decoding."""
LEAST_GAIN = 0.02
"""How much faster than plain decoding, as a share, drafts should make steps: times are not known better than so."""
PLAIN_EVERY = 100
"""Steps with drafts at a load after which one does without: what plain decoding costs shows only where it is done."""
CREDIT_S = 0.1
"""Most seconds that the ledger holds: what is lost at once when predictable text ends."""


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
    """By method and load."""


@dataclass
class Drafts:
    """What a method verifies in a step."""

    bands: np.ndarray
    """int [B], of the sequences that it drafts for."""
    probes: bool
    """Whether it is not expected to pay, and drafts to see whether that is still right."""
    nodes: int = 0
    expected: float = 0.0
    """Nodes of these that should be accepted."""


@dataclass
class Step:
    """A step on its way."""

    shape: StepShape
    load: str
    """The shape's, which estimates are kept by."""
    plain: bool
    """Whether nothing may be drafted, to see what that costs."""
    drafts: dict[str, Drafts] = field(default_factory=dict)
    """By method that drafts."""

    @property
    def rows(self) -> int:
        """Rows known so far: a root of each sequence, the prompts', and the nodes of methods that have drafted."""
        return self.shape.running + self.shape.prompt_rows + sum(drafts.nodes for drafts in self.drafts.values())

    @property
    def tokens(self) -> float:
        """Expected tokens so far."""
        return self.shape.running + sum(drafts.expected for drafts in self.drafts.values())


class BudgetController:
    """Decides for each step, in this order: `begin`; for each method `pays`, and if so `share`; `end`.

    A ledger keeps the promise that drafts are never slower than plain decoding, whatever the estimates say: it is
    credited with ALLOWED_LOSS of the time, debited with what each step with drafts lost, and paid back what it won. On
    an empty one nothing is drafted. A full one pays for probes of what is not expected to pay.
    """

    def __init__(self, estimates: Estimates):
        self.estimates = estimates
        self.balance_s = CREDIT_S
        self._since_plain: dict[str, int] = {}
        """Steps with drafts since the last one without, by load."""
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
        self.step = Step(shape, shape.load, self._since_plain.get(shape.load, 0) >= PLAIN_EVERY)

    def pays(self, method: str, bands: np.ndarray) -> bool:
        """Whether the method should draft for its sequences, of these bands [B]: whether its last drafts at this load
        made steps faster, or a probe is due."""
        if self.step.plain:
            return False
        history = self.estimates.histories.get(self._key(method))
        ratio = float(self._calibration(method).ratios[bands].mean())
        should_pay = history is not None and history.advantage(ratio) >= LEAST_GAIN
        if self.balance_s <= 0:
            self.held_back += should_pay
            return False
        if not should_pay:
            drafting = joined({*self.step.drafts, method})
            loss = self.costs.step(self.step.rows + len(bands), drafting, self.step.shape) - self.plain_s
            if self.balance_s < min(loss, CREDIT_S):
                return False
        self.step.drafts[method] = Drafts(bands, probes=not should_pay)
        return True

    def share(self, method: str, tree: TokenTree) -> list[int]:
        """How many nodes of each tree of the method's sequences to verify, the best of each: the total that
        `best_count` says, of the best nodes of all trees."""
        drafts = self.step.drafts[method]
        count = len(tree)
        owners = np.repeat(np.arange(count), tree.sizes)
        scored = np.exp(tree.scores)
        chances = np.minimum(scored * self._calibration(method).ratios[drafts.bands][owners], 1.0)
        chances[tree.offsets[:-1]] = -1.0  # roots, which are no drafts, come last
        order = np.argsort(-chances, kind="stable")[: len(chances) - count]
        ranked, tokens = chances[order], self.step.tokens
        seconds = self.costs.steps(self.step.rows, len(ranked), joined(self.step.drafts), self.step.shape)
        seconds -= self.prompt_s
        nodes = best_count(ranked, tokens, seconds)
        if drafts.probes:
            # As if scores were right: what they promised and did not hold shows only where it is tried again.
            hoped = best_count(scored[order], tokens, seconds)
            nodes = min(max(hoped, nodes, 1), len(ranked))
        chosen = order[:nodes]
        promised = float(scored[chosen].sum()) / tokens
        before_s = self.costs.step(self.step.rows, joined(self.step.drafts.keys() - {method}), self.step.shape)
        before_s -= self.prompt_s
        self._remember(method, promised, float(seconds[nodes]) / before_s)
        drafts.nodes, drafts.expected = nodes, float(ranked[:nodes].sum())
        return np.bincount(owners[chosen], minlength=count).tolist()

    def end(
        self,
        methods: Sequence[str],
        temperatures: Sequence[float],
        tree: TokenTree,
        accepted: Sequence[int],
        step_s: float,
        target_s: float,
    ) -> None:
        """Learn from the step: the method and the temperature of each sequence that decoded, the tree that was
        verified, how many of its nodes were accepted, and the seconds that the step took, of which `target_s` in the
        target."""
        step, plain_s = self.step, self.plain_s
        rows = int(tree.sizes.sum()) + step.shape.prompt_rows
        # Methods with a fixed budget draft without having asked.
        drafts = (tree.sizes > 1).tolist()
        drafting = joined({*step.drafts, *(name for name, drafted in zip(methods, drafts, strict=True) if drafted)})
        expected_s = self.costs.step(rows, drafting, step.shape)
        self.costs.observe(rows, drafting, step.shape, step_s, target_s)
        self.balance_s += ALLOWED_LOSS * step_s
        if step.drafts:
            self._calibrate(methods, temperatures, drafts, tree, np.asarray(accepted))
            # A step that was delayed by something else, as the model knows better, is no loss of its drafts.
            taken = min(max(step_s, expected_s / 2), 2 * expected_s)
            # An accepted token saves its share of a step that decodes only.
            self.balance_s += plain_s + (plain_s - self.prompt_s) * sum(accepted) / step.shape.running - taken
        self.balance_s = min(self.balance_s, CREDIT_S)
        self._since_plain[step.load] = self._since_plain.get(step.load, 0) + 1 if step.drafts else 0

    def _calibrate(
        self,
        methods: Sequence[str],
        temperatures: Sequence[float],
        drafts: Sequence[bool],
        tree: TokenTree,
        accepted: np.ndarray,
    ) -> None:
        bands = bands_of(np.array(temperatures))
        expected = np.add.reduceat(np.exp(tree.scores), tree.offsets[:-1]) - 1
        for method in self.step.drafts:
            chosen = [
                index
                for index, (name, drafted) in enumerate(zip(methods, drafts, strict=True))
                if drafted and name == method
            ]
            self._calibration(method).observe(bands[chosen], accepted[chosen], expected[chosen])

    def _calibration(self, method: str) -> Calibration:
        calibrations = self.estimates.calibrations
        if method not in calibrations:
            calibrations[method] = Calibration()
        return calibrations[method]

    def _key(self, method: str) -> str:
        return f"{method}:{self.step.load}"

    def _remember(self, method: str, promised: float, slower: float) -> None:
        if history := self.estimates.histories.get(self._key(method)):
            history.add(promised, slower)
        else:
            self.estimates.histories[self._key(method)] = History(promised=promised, slower=slower)

    @property
    def prompt_s(self) -> float:
        """Seconds of the step's prompt rows: they pass whatever is drafted, and no draft makes them fewer."""
        shape = self.step.shape
        if not shape.prompt_rows:
            return 0.0
        return self.costs.target(shape.running + shape.prompt_rows, shape) - self.costs.target(shape.running, shape)

    @property
    def plain_s(self) -> float:
        """Seconds of the step without any drafts."""
        shape = self.step.shape
        return self.costs.step(shape.running + shape.prompt_rows, "", shape)


def joined(methods: Iterable[str]) -> str:
    """The methods that draft in a step, as a key of its costs."""
    return "+".join(sorted(methods))


@dataclass(frozen=True)
class MethodBudgets:
    """One method's side of a controller."""

    controller: BudgetController
    method: str

    def pay(self, temperatures: np.ndarray) -> bool:
        """See `BudgetController.pays`, for sequences of these temperatures [B]."""
        return self.controller.pays(self.method, bands_of(temperatures))

    def share(self, tree: TokenTree) -> list[int]:
        """See `BudgetController.share`."""
        return self.controller.share(self.method, tree)
