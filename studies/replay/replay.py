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

from redraft.batch import DraftCandidates
from redraft.decoding.token_tree import TokenTree, follow
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.loops.beam_search import BeamSearch
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

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per step, the bonus token included."""
        return 1 + float(np.mean(self.accepted))

    @property
    def figures(self) -> dict[str, float]:
        """Tokens per step with half the width of their interval, and the number of steps."""
        steps = len(self.accepted)
        return {"acceptance_length": self.acceptance_length, "interval": interval(self.accepted), "steps": steps}

    def follow(self, tree: TokenTree, answer: Answer) -> None:
        """Decode a known answer with the trees at its tokens but the last."""
        text = answer.text
        index = 0
        while index < len(text) - 1:
            accepted = len(follow(tree.nodes[index], text[index + 1 :]))
            self.accepted.append(accepted)
            self.rows.append(len(tree.nodes[index]))
            index += accepted + 1


class Replayer:
    """A drafter that drafts at every place of an answer."""

    def __init__(self, drafter: Drafter, levels: int):
        """Drafts will be `levels` deep at most. Raises ValueError for a drafter that reads a context or that cannot
        draft so deep."""
        if drafter.reads_context:
            raise ValueError(f"a drafter {drafter.name!r} reads a context: it cannot be replayed")
        drafter.prepare(0, levels)
        self.drafter = drafter

    @classmethod
    def load(cls, folder: Path, target: Target, levels: int) -> Replayer:
        """The drafter of a folder. Raises as `load_drafter`, and ValueError as above."""
        return cls(load_drafter(folder, target).float(), levels)

    @torch.no_grad()
    def draft(self, answer: Answer, width: int, length: int) -> DraftCandidates:
        """A beam search with every token of the answer but the last as its root."""
        roots = answer.tokens[answer.start : -1].to(torch.int32)
        states = answer.hidden[answer.start - 1 : answer.start - 1 + len(roots)]
        search = BeamSearch(self.drafter, width, length, width)
        size = max(1, ROWS_AT_ONCE // width)
        parts = [
            [part.numpy() for part in search((states[first : first + size], roots[first : first + size]))[:3]]
            for first in range(0, len(roots), size)
        ]
        return DraftCandidates(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


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
