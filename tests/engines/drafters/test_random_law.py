"""What a real engine draws and the scheduler verifies has the target's own law.

Requests of many seeds generate a few tokens each; tokens 2 and 3 come from trees. Their laws are the module's, summed
over everything before. Statistics are in standard deviations; biases that are planted must be found with the same
number of requests, or fewer. The slow constructions would catch an engine whose draws have another law than they name.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch, DraftDraws, DraftSampling
from redraft.bundle.method import MethodConfig
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.engines import load_engine
from redraft.engines.api import Engine
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.request import GenerateRequest, SamplingConfig
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.conftest import slow_but
from tests.decoding.laws import chi_square
from tests.engines.draws import LEVELS
from tests.engines.tiny import LIMITS, METHOD, VOCAB, tiny_bundle, tiny_drafter, tiny_drafter_of, tiny_target
from tests.joint_law import CODEC, THRESHOLD, served
from tests.mutants import MUTANTS, planted

SUPPORT, PROMPT, TEMPERATURE = 50, [5, 40, 7], 4.0
REQUESTS = 2000
VERIFICATIONS = {
    "stochastic_beam": ["recursive_rejection"],
    "gumbel_top_k": ["recursive_rejection"],
    "independent": ["multi_round", "k_seq"],
    "random_chain": ["rejection"],
}
DRAFTERS = {"gumbel_top_k": "block", "independent": "eagle3"}
"""Kinds that draw, where it is not a recurrent drafter: one whose levels know nothing of the tokens above but what the
last of them says, and one with a head of its own."""
BONUS = {mutant.case: mutant for mutant in MUTANTS if mutant.name.startswith("bonus drawn from q")}


@pytest.fixture(scope="module")
def pairs(target: Target) -> np.ndarray:
    """float64 [V, V], the law of tokens 2 and 3."""

    def after(paths: torch.Tensor) -> torch.Tensor:
        hidden = target(paths, causal_attend(target.config, paths.shape[1])).hidden[:, -1]
        return (target.lm_head(hidden).double() / TEMPERATURE).softmax(-1)

    every = torch.arange(VOCAB)
    prompt = torch.tensor(PROMPT)
    first = after(prompt[None])[0]
    law = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token in every:
        second = after(torch.cat([prompt, token[None]])[None])[0]
        third = after(torch.cat([prompt.expand(VOCAB, -1), token.expand(VOCAB, 1), every[:, None]], dim=1))
        law += first[token] * second[:, None] * third
    return law.numpy()


def drafter_of(construction: str) -> Drafter:
    """As undecided as the target is at its temperature."""
    if construction in DRAFTERS:
        return tiny_drafter_of(tiny_target(), DRAFTERS[construction])
    drafter = tiny_drafter(tiny_target())
    drafter.output.weight /= 8
    return drafter


@pytest.fixture(scope="module", params=slow_but(["stochastic_beam"], VERIFICATIONS))
def drawing(request, tmp_path_factory) -> tuple[str, Engine]:
    name, drafter = request.param, drafter_of(request.param)
    plan = {"levels": LEVELS[name], "support": SUPPORT, "construction": name, "ngram": False}
    return name, load_engine(tiny_bundle(tmp_path_factory.mktemp(name), tiny_target(), trained=drafter, **plan))


def sequence_of(seed: int) -> RequestState:
    sampling = SamplingConfig(temperature=TEMPERATURE, seed=seed)
    request = GenerateRequest(id=str(seed), input_ids=PROMPT, max_tokens=4, sampling=sampling)
    return RequestState(seed, request, PROMPT, CODEC, frozenset())


def deviation(pairs: np.ndarray, engine: Engine, construction: str, verification: str, requests: int) -> float:
    """The largest deviation of tokens 2, of tokens 3, and of both (coarsely) from their law."""
    budget = sum(RANDOM_CONSTRUCTIONS[construction].shape(LEVELS[construction]).widths)
    plan = MethodConfig(
        construction=construction,
        verification=verification,
        tree_budget=budget,
        levels=LEVELS[construction],
        support=SUPPORT,
    )
    scheduler = Scheduler(engine, Limits(**LIMITS.model_dump()), {METHOD: plan})
    counts = np.zeros((VOCAB, VOCAB), int)
    for output in served(scheduler, map(sequence_of, range(requests))):
        counts[output.token_ids[1], output.token_ids[2]] += 1
    assert counts.sum() == requests
    assert scheduler.totals.accepted > 0.2 * scheduler.totals.sequence_steps, "verification has something to verify"
    return max(chi_square(view(counts).ravel(), view(pairs).ravel() * requests) for view in (second, third, coarse))


def second(law: np.ndarray) -> np.ndarray:
    return law.sum(axis=1)


def third(law: np.ndarray) -> np.ndarray:
    return law.sum(axis=0)


def coarse(law: np.ndarray) -> np.ndarray:
    """A law by the rest modulo 8, which tells what the drafter knows (even tokens) from what it does not."""
    rest = np.arange(VOCAB)[:, None] % 8 == np.arange(8)
    return rest.T @ law @ rest


def test_the_law_is_the_targets_and_a_bonus_from_elsewhere_is_found(drawing, pairs):
    construction, engine = drawing
    for verification in VERIFICATIONS[construction]:
        assert deviation(pairs, engine, construction, verification, REQUESTS) < THRESHOLD
        with planted(BONUS["K-SEQ" if verification == "k_seq" else "RSD-S"]):
            assert deviation(pairs, engine, construction, verification, REQUESTS // 4) > THRESHOLD


class _Damped:
    """An engine that draws likely tokens too often, and says nothing of it."""

    def __init__(self, engine: Engine):
        self.execute, self._drafter = engine.execute, engine.drafters[METHOD]
        self.drafters, self.reads_context, self.reads_text = {METHOD: self}, self._drafter.reads_context, False
        self.reuse_refusal = "the errors are those of draws"

    def draft(self, batch: DraftBatch, noise=None):
        return self._drafter.draft(batch, noise)

    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        sampling.noise *= 0.7
        return self._drafter.draw(batch, sampling)  # type: ignore[attr-defined]

    def close(self) -> None:
        pass


def test_draws_that_are_not_from_the_distribution_they_name_are_found(drawing, pairs):
    construction, engine = drawing
    verification = RANDOM_CONSTRUCTIONS[construction].verification
    assert deviation(pairs, _Damped(engine), construction, verification, REQUESTS) > THRESHOLD
