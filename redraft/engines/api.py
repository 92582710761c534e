"""What the scheduler sees of an engine: ragged target batches in, logits or tokens and hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from redraft.batch import DraftBatch, DraftCandidates, DraftDraws, DraftSampling, TargetBatch
from redraft.engines.hidden import Hidden

if TYPE_CHECKING:
    from redraft.decoding.sampling import Sampler

Samplers: TypeAlias = "Sequence[Sampler | None] | None"
"""Of the sequences of a batch, in order; None: of none."""
Gather: TypeAlias = Callable[[Any], Any]
"""Brings the logits [R, columns of its shard] of every rank, an array or a tensor, to rank 0 as [R, V]; others are left
with no rows. Where R is 0 nothing is sent or changed."""


def alone(logits: Any) -> Any:
    """The `Gather` of one rank."""
    return logits


class LogitRows(Protocol):
    """What a step gives for its logit rows; the logits of all of them, float32 [R, V], are such."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """For some rows of one sequence logits float32 [n, V], or tokens int32 [n]."""
        ...


class Engine(Protocol):
    """A loaded bundle's networks on one device. Not thread-safe."""

    @property
    def drafters(self) -> Mapping[str, DraftEngine]:
        """The drafters of the bundle's methods by the method's name; those without a neural drafter have none."""
        ...

    def execute(self, batch: TargetBatch, samplers: Samplers = None) -> tuple[LogitRows, Hidden | None]:
        """One target forward: what comes of its logit rows and, where the bundle drafts, hidden states [T, H].

        Where a sequence has a sampler, which is plain and stands at the sequence's first logit row, an engine may
        choose what it would choose at each of the sequence's logit rows, and give these tokens in place of logits.
        Without `samplers` all rows give logits. Both results are valid until the next call of the engine or a drafter.
        """
        ...

    def close(self) -> None:
        """Free the networks and the caches."""
        ...


class DraftEngine(Protocol):
    """The drafter of one method."""

    @property
    def reads_context(self) -> bool:
        """Whether it takes every pair of a sequence: see `DraftBatch`."""
        ...

    @property
    def reads_text(self) -> bool:
        """Whether these begin with the sequence's first token, which follows no hidden state: any may stand there."""
        ...

    def draft(self, batch: DraftBatch) -> DraftCandidates:
        """Draft for the whole batch, in one call."""
        ...


@runtime_checkable
class ResamplingEngine(DraftEngine, Protocol):
    """A drafter that drafts again from what is left of the chains of earlier drafts."""

    def resample(self, chains: list[np.ndarray], roots: np.ndarray) -> DraftCandidates:
        """Draft below new roots int32 [B], in one call: float32 [n, K] are the raw logits of the n levels below each
        root. Log-probabilities of the levels behind them are -inf."""
        ...


@runtime_checkable
class DrawingEngine(DraftEngine, Protocol):
    """A drafter whose network draws at random."""

    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """Draw for the whole batch, in one call."""
        ...
