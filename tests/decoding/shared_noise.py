"""A drafter on the toy target that agrees with it, drafting by the noise that the target draws with: if all is keyed
alike, every drafted token is accepted.

No test of the text can see a wrong key: the walk is lossless on any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.engines.api import Engine
from redraft.engines.host_buffers import NoiseBuffers
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.paths import Children
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.toy_engine import ToyEngine, _mix, only, toy_codec

VOCAB, LENGTH, SLOTS = 111, 6, 3
CODEC = toy_codec(VOCAB)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 11},
    {},
    {"temperature": 1.3, "seed": 5},
)


@dataclass
class ExactPaths:
    """Nodes by the target's states after them; `logits(state, level)` are the target's own [V]. The drafter's columns
    are the tokens in reverse order."""

    logits: Callable[[int, int], np.ndarray]
    follow: Callable[[int, int], int]
    states: list[int]
    level: int = 0
    raw_logits: None = None

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.stack([self.logits(state, self.level)[::-1].copy() for state in self.states]))
        values, columns = torch.log_softmax(rows, dim=-1).topk(count)
        return values, (VOCAB - 1 - columns).to(torch.int32)

    def extend(self, children: Children) -> ExactPaths:
        pairs = zip(children.origins.tolist(), children.tokens.tolist(), strict=True)
        states = [self.follow(self.states[origin], token) for origin, token in pairs]
        return ExactPaths(self.logits, self.follow, states, self.level + 1)


class AgreeingEngine(ToyEngine):
    """A target whose logits depend on the whole path, and a drafter that knows them."""

    def __init__(self, candidates: int = 1):
        super().__init__(VOCAB, SLOTS, max_len=80, max_tree=24, sharpness=1.5)
        self.candidates = candidates

    def follow(self, state: int, token: int) -> int:
        """The state after one more token."""
        return _mix(state, token)

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        before = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        states = [self.follow(*pair) for pair in zip(before, batch.tokens.tolist(), strict=True)]
        return self.searched(LENGTH, states, lambda state, _: self.logits_after(state), noise)

    def searched(
        self, length: int, states: list[int], logits: Callable[[int, int], np.ndarray], noise: SharedNoise | None
    ) -> DraftCandidates:
        inputs = NoiseBuffers(len(states)).fill(noise, len(states)).values()
        loop = BeamSearch(self, 1, length, self.candidates, support=VOCAB)
        self._begin = ExactPaths(logits, self.follow, states)
        candidates, scores, parents = loop([torch.tensor(states), *map(torch.from_numpy, inputs)])
        return DraftCandidates(candidates.numpy(), scores.numpy(), parents.numpy())

    def paths(self, _: object, states: Tensor) -> ExactPaths:
        """See `Paths`."""
        return self._begin


class ChainEngine(AgreeingEngine):
    """A target whose logits depend only on the position, so that a hidden-state chain can agree with it."""

    def path_state(self, tokens) -> int:
        return len(tokens)

    def follow(self, state: int, token: int) -> int:
        return state + 1

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        drafts = super().draft(batch, noise)
        before = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        chains = [[self.logits_after(state + 1 + level) for level in range(LENGTH)] for state in before]
        drafts.raw_logits = np.array(chains)
        return drafts

    def resample(
        self, chains: list[np.ndarray], roots: np.ndarray, noise: SharedNoise | None = None
    ) -> DraftCandidates:
        """From chains of `LENGTH` - 1 levels or less; a state is a chain's place."""
        padded = np.zeros((len(chains), LENGTH, VOCAB), np.float32)
        for rows, chain in zip(padded, chains, strict=True):
            rows[: len(chain)] = chain
        self.follow = lambda state, token: state  # type: ignore[method-assign]
        drafts = self.searched(LENGTH - 1, list(range(len(chains))), lambda place, level: padded[place, level], noise)
        del self.follow
        for b, chain in enumerate(chains):
            drafts.log_probs[b, len(chain) :] = -np.inf
        return drafts


@dataclass
class Outcome:
    """Nodes that were drafted and that were accepted, by request; the texts; trees by their number of nodes."""

    drafted: dict[int, int]
    accepted: dict[int, int]
    texts: dict[int, list[int]]
    sizes: list[int]

    @property
    def all_accepted(self) -> bool:
        return self.drafted == self.accepted


def generate(engine: Engine, plans: Mapping[str, MethodConfig], tokens: tuple[int, ...] = (55, 47, 38, 21)) -> Outcome:
    """Requests of all samplings, three at a time."""
    sizes = list[int]()
    limits = Limits(slots=SLOTS, max_len=80, max_tree=40, prefill_chunk=16)
    scheduler = Scheduler(
        engine, limits, plans, observe=lambda tree, place, _: sizes.append(int(tree.sizes[place]) - 1)
    )
    texts: dict[int, list[int]] = {}
    made = []
    for key, count in enumerate(tokens):
        prompt = list(range(1, 9 + 3 * key))
        sampling = SAMPLINGS[key % len(SAMPLINGS)]
        request = GenerateRequest(id=str(key), input_ids=prompt, max_tokens=count, sampling=sampling)
        made.append(RequestState(key, request, prompt, CODEC, frozenset()))
        scheduler.submit(made[-1])
    while not scheduler.idle:
        texts |= {output.key: output.token_ids for output in scheduler.step()}
    counts = [{one.key: getattr(one.stats, name) for one in made} for name in ("drafted", "accepted")]
    return Outcome(*counts, texts, sizes)


def chain_plan(budget: BudgetTable, **changes: Any) -> dict[str, MethodConfig]:
    """The best beam, cut to its budget, as the toy engine's method."""
    return only(MethodConfig(construction="chain", budget=budget, **changes))
