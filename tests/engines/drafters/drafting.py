"""Drafts of an engine for sequences whose pairs come in over time, and what a drafter's module says they should be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from redraft.batch import DraftBatch, DraftCandidates
from redraft.engines.api import Engine
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.block import BlockDrafter
from redraft.model_defs.drafters.context_drafter import ChainDrafter, ContextDrafter
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.eagle3 import ParallelEagle3Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.medusa import MedusaDrafter
from redraft.model_defs.drafters.recurrent import RecurrentDrafter
from redraft.model_defs.drafters.token_info import DTYPES, InfoForm, TokenInfoFactors
from redraft.model_defs.loops.operators import TORCH
from redraft.model_defs.target.attention import DenseCache
from tests.engines.tiny import METHOD, VOCAB

HIDDEN = 96


def info_of(drafter: Drafter, form: InfoForm, token: int) -> Tensor:
    """What a token adds to the first logits [K], as a network holds it."""
    if isinstance(drafter.token_info, TokenInfoFactors):
        z, up = drafter.token_info.factors(torch.tensor(token))
        return up @ z
    assert drafter.token_info is not None
    if form == InfoForm.low_rank:
        return drafter.token_info(torch.tensor(token))
    return drafter.token_info.collapse(DTYPES[form])(torch.tensor(token))


def following(
    drafter: Drafter, hidden: Tensor, tokens: Tensor, path: list[int], form: InfoForm = InfoForm.int8
) -> Tensor:
    """Log-probabilities [K] of what follows the root (the last of the tokens [n]) and a path below it, for target
    hidden states [n, H] that the tokens follow."""
    if isinstance(drafter, MedusaDrafter):
        return (drafter.head_rows @ drafter.heads[len(path)](hidden[-1])).log_softmax(-1)
    if isinstance(drafter, DraftLM):
        text = torch.tensor([[*tokens.tolist(), *path]])
        features = drafter(text, DenseCache(drafter.lm_config, 1, 200, hidden).attend)
        return (drafter.head_rows @ features[0, -1]).log_softmax(-1)
    if isinstance(drafter, RecurrentDrafter):
        state = drafter.first_state(tokens[-1:].long())
        for token in path:
            state = drafter.next_state(state, torch.tensor([token]))
        return drafter.logits(state, hidden[-1:])[0].log_softmax(-1)
    if isinstance(drafter, BlockDrafter | ParallelEagle3Drafter):
        logits = block_logits(drafter, hidden, tokens)[len(path)]
        if drafter.token_info is not None:
            logits = logits + info_of(drafter, form, [int(tokens[-1]), *path][-1])
        return logits.log_softmax(-1)
    assert isinstance(drafter, ContextDrafter)
    cache = DenseCache(drafter.layer_config, 1, 200, hidden)
    state = drafter.ingest(hidden[None], tokens[None], cache.attend)[:, -1:]
    cache.starts += len(tokens)
    for token in path:
        state = drafter.grow(state, torch.tensor([[token]]), cache.attend)
        cache.starts += 1
    logits = drafter.head_weight @ drafter.read(state)[0, 0]
    if isinstance(drafter, HiddenStateDrafter) and drafter.token_info is not None:
        info = info_of(drafter, form, [int(tokens[-1]), *path][-1])
        logits[: len(info)] += info
    return logits.log_softmax(-1)


def block_logits(drafter: ChainDrafter, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Raw logits [4, K] of a drafter that drafts all levels at once, by the torch operators over an empty cache. Tests
    of its checkpoints' forms compare these with their definitions."""
    prepared, heads, rows = copy.deepcopy(drafter), drafter.layer_config, len(tokens) + 40
    prepared.prepare(rows, 4)
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, len(tokens)], [0], [0])]
    shape = (1, heads.num_kv_heads, rows, heads.head_size)
    caches = [torch.zeros(shape) for _ in range(2 * drafter.context_layers)]
    return prepared.paths(TORCH, hidden, tokens.int(), *ints, *caches).raw_logits


def following_chain(drafter: Drafter, form: InfoForm, chain: np.ndarray, root: int, path: list[int]) -> Tensor:
    """The same for the raw logits [n, K] of a chain."""
    logits = torch.tensor(chain[len(path)])
    if drafter.token_info is not None:
        info = info_of(drafter, form, [root, *path][-1])
        logits[: len(info)] += info
    return logits.log_softmax(-1)


@dataclass
class Drafting:
    """A sequence whose pairs come in over time."""

    slot: int
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0, HIDDEN))
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    ingested: int = 0

    def grow(self, rng: np.random.Generator, count: int) -> None:
        new = torch.from_numpy(rng.standard_normal((count, self.hidden.shape[1])).astype(np.float32))
        self.hidden = torch.cat([self.hidden, new])
        self.tokens = torch.cat([self.tokens, torch.from_numpy(rng.integers(0, VOCAB, count).astype(np.int32))])


def draft(engine, sequences: list[Drafting]) -> DraftCandidates:
    """Draft for sequences that have pairs pending; they are ingested then."""
    pending = [len(s.tokens) - s.ingested for s in sequences]
    batch = DraftBatch(
        features=torch.cat([s.hidden[s.ingested :] for s in sequences]).numpy(),
        tokens=torch.cat([s.tokens[s.ingested :] for s in sequences]).numpy(),
        row_offsets=np.cumsum([0, *pending]).astype(np.int32),
        slots=np.array([s.slot for s in sequences], np.int32),
        cache_lengths=np.array([s.ingested for s in sequences], np.int32),
    )
    for s in sequences:
        s.ingested = len(s.tokens)
    return DraftCandidates(*(array.copy() for array in arrays_of(engine.drafters[METHOD].draft(batch))))


def arrays_of(drafted: DraftCandidates) -> list[np.ndarray]:
    return [array for array in dataclasses.astuple(drafted) if array is not None]


def check(
    drafter: Drafter, drafted: DraftCandidates, b: int, expect: Callable[[list[int]], Tensor], atol: float = 2e-4
) -> None:
    """Every candidate has the log-probability that is expected after its path, and no other is likelier."""
    _, length, width, count = drafted.candidates.shape
    row_of = {int(token): row for row, token in enumerate(drafter.hot_ids)}
    paths: list[tuple[list[int], float]] = [([], 0.0)]
    for level in range(length):
        candidates, log_probs = drafted.candidates[b, level], drafted.log_probs[b, level]
        if np.isinf(log_probs[0]).all():
            break
        if level:
            flat = drafted.parents[b, level].tolist()
            before, scores = drafted.candidates[b, level - 1].flatten(), drafted.log_probs[b, level - 1].flatten()
            paths = [([*paths[place // count][0], int(before[place])], float(scores[place])) for place in flat]
        for w, (path, score) in enumerate(paths):
            expected = expect(path)
            found = torch.from_numpy(log_probs[w] - score)
            chosen = expected[[row_of[token] for token in candidates[w].tolist()]]
            torch.testing.assert_close(found, chosen, atol=atol, rtol=1e-4)
            torch.testing.assert_close(found, expected.topk(count).values, atol=atol, rtol=1e-4)
        assert len({tuple(path) for path, _ in paths}) == (width if level else 1)


def check_draft(drafter: Drafter, drafted: DraftCandidates, b: int, s: Drafting) -> None:
    check(drafter, drafted, b, lambda path: following(drafter, s.hidden, s.tokens, path))


def check_drafts(
    drafter: Drafter,
    engine: Engine,
    sequences: list[Drafting],
    rng: np.random.Generator,
    steps: Sequence[tuple[list[int], list[int]]],
) -> tuple[list[Drafting], DraftCandidates]:
    """Check the drafts of some of the sequences at each step, after so many pairs more of each. Returns the last step's
    sequences and their drafts."""
    for company, counts in steps:
        drafting = [sequences[place] for place in company]
        for s, count in zip(drafting, counts, strict=True):
            s.grow(rng, count)
        drafted = draft(engine, drafting)
        for b, s in enumerate(drafting):
            check_draft(drafter, drafted, b, s)
    return drafting, drafted
