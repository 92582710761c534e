"""Drafters as torch modules, in float32, replayed over the target's known answers.

Speculation does not change the output, so following an answer through the trees that a drafter proposes at its places
gives the acceptance of live greedy decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from redraft.batch import DraftCandidates
from redraft.decoding.token_tree import TokenTree, follow
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.chains import Resampler
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer

ROWS_AT_ONCE = 512
"""Nodes that are expanded at a time."""


@dataclass
class Outcome:
    """What following answers through trees gave."""

    accepted: list[int] = field(default_factory=list)
    """Per step, the accepted tokens."""
    rows: list[int] = field(default_factory=list)
    """Per step, the nodes of its tree, root included."""
    offered_by_depth: list[int] = field(default_factory=list)
    """Steps whose path got to depth 0, 1, ... where the answer goes on."""
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per step, the bonus token included."""
        return 1 + float(np.mean(self.accepted))

    @property
    def conditional(self) -> list[float]:
        """Conditional acceptance rate by depth."""
        return [a / max(o, 1) for a, o in zip(self.accepted_by_depth, self.offered_by_depth, strict=True)]

    @property
    def figures(self) -> dict[str, float]:
        """Tokens per step with half the width of their interval, and the number of steps."""
        steps = len(self.accepted)
        return {"acceptance_length": self.acceptance_length, "interval": interval(self.accepted), "steps": steps}

    def follow(self, tree: TokenTree, answer: Answer, depths: int) -> None:
        """Decode a known answer with the trees at its tokens but the last; accepted tokens are counted by depth up to
        `depths`, the deepest that the trees have."""
        text = answer.text
        for counts in (self.offered_by_depth, self.accepted_by_depth):
            counts.extend([0] * (depths - len(counts)))
        index = 0
        while index < len(text) - 1:
            accepted = len(follow(tree.nodes[index], text[index + 1 :]))
            self.accepted.append(accepted)
            self.rows.append(len(tree.nodes[index]))
            for depth in range(min(depths, len(text) - 1 - index)):
                self.offered_by_depth[depth] += accepted >= depth
                self.accepted_by_depth[depth] += accepted > depth
            index += accepted + 1


class Replayer:
    """A drafter that drafts at every place of an answer."""

    def __init__(self, drafter: Drafter, levels: int):
        """Drafts will be `levels` deep at most. Raises ValueError for a drafter that attends to its own draft tokens or
        that cannot draft so deep."""
        if drafter.reads_context and not isinstance(drafter, HiddenStateDrafter):
            raise ValueError(f"a drafter {drafter.name!r} attends to its own draft tokens: it cannot be replayed")
        drafter.prepare(0, levels)
        self.drafter, self.levels = drafter, levels

    @classmethod
    def load(cls, folder: Path, target: Target, levels: int) -> Replayer:
        """The drafter of a folder. Raises as `load_drafter`, and ValueError as above."""
        return cls(load_drafter(folder, target).float(), levels)

    @torch.no_grad()
    def draft(self, answer: Answer, width: int, length: int, candidates: int | None = None) -> DraftCandidates:
        """A beam search with every token of the answer but the last as its root; `candidates` children of each node,
        default: as many as the beam is wide."""
        roots = answer.tokens[answer.start : -1].to(torch.int32)
        states = self._states(answer, len(roots), length)
        search: nn.Module | None = None
        parts = []
        size = max(1, ROWS_AT_ONCE // width)
        for first in range(0, len(roots), size):
            here, tokens = states[first : first + size], roots[first : first + size]
            drafter, inputs = self._inputs(here, tokens, length)
            search = search or BeamSearch(drafter, width, length, candidates or width)
            parts.append([part.numpy() for part in search(inputs)[:3]])
        return DraftCandidates(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _states(self, answer: Answer, count: int, length: int) -> Tensor:
        """What the drafter starts from at each place: the target's hidden states [P, H], or the chain's [P, L, H]."""
        before = torch.arange(answer.start - 1, answer.start - 1 + count)
        if not isinstance(self.drafter, HiddenStateDrafter):
            return answer.hidden[before]
        windows = whole_text(answer, before, length)
        return torch.stack(list(self.drafter.unroll(windows, [count] * length)), dim=1)

    def _inputs(self, states: Tensor, roots: Tensor, length: int) -> tuple[Drafter | Resampler, tuple[Tensor, ...]]:
        if not isinstance(self.drafter, HiddenStateDrafter):
            return self.drafter, (states, roots)
        logits = self.drafter.raw_logits(states.flatten(0, 1))
        return Resampler(self.drafter, length), (logits, torch.arange(len(roots), dtype=torch.int32), roots)


def whole_text(answer: Answer, positions: Tensor, levels: int) -> Windows:
    """An answer with its prompt as one window, to be drafted from `positions` int64 [P]."""
    behind = levels + 1
    tokens = torch.nn.functional.pad(answer.tokens, (0, behind))
    return Windows(
        tokens=tokens[None],
        hidden=torch.nn.functional.pad(answer.hidden, (0, 0, 0, behind))[None],
        documents=torch.zeros_like(tokens)[None],
        positions=positions[None],
        drafted=torch.ones_like(positions, dtype=torch.bool)[None],
    )


def cut(drafts: DraftCandidates, length: int) -> DraftCandidates:
    """The first levels of drafts: what a shorter beam search gives."""
    return DraftCandidates(*(part[:, :length] for part in (drafts.candidates, drafts.log_probs, drafts.parents)))


def roots_of(answer: Answer) -> np.ndarray:
    """The roots int32 [P] at an answer's places."""
    return np.array(answer.text[:-1], np.int32)


def interval(values: Iterable[float]) -> float:
    """Half the width of the 95% interval of a mean of independent values."""
    array = np.fromiter(values, float)
    return float(1.96 * array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else float("nan")
