"""The engine as the scheduler sees it: ragged target batches in, logits or tokens and features out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from redraft.batch import DraftBatch, DraftCandidates, DraftDraws, DraftSampling, SharedNoise, TargetBatch
from redraft.engines.features import Features

if TYPE_CHECKING:
    from redraft.decoding.sampling import Sampler

Samplers: TypeAlias = "Sequence[Sampler | None] | None"
"""A sampler, or none, for each sequence of a batch in order; None: no sequence has one."""
Gather: TypeAlias = Callable[[Any], Any]
"""Brings the logits [R, columns of its shard] of every rank, an array or a tensor, to rank 0 as [R, V]; others are left
with no rows. Where R is 0 nothing is sent or changed."""

Meanwhile: TypeAlias = Callable[[], None]
"""What the host does while a device executes a step."""


def local_logits(logits: Any) -> Any:
    """The `Gather` of a single rank, which has all columns."""
    return logits


def forbid_unknown(logits: Any, ranges: Iterable[tuple[int, int]]) -> Any:
    """Logits [R, V], an array or a tensor, in which those of `TargetInfo.unknown_tokens` have become -inf in place."""
    for first, end in ranges:
        logits[:, first:end] = -math.inf
    return logits


class LogitRows(Protocol):
    """Logits or sampled tokens of a step's logit rows. An array of all logits, float32 [R, V], or of all tokens,
    int32 [R], is one."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Logits float32 [n, V], or tokens int32 [n], of some rows of one sequence."""
        ...


class Engine(Protocol):
    """A loaded bundle's networks on one device. Not thread-safe."""

    @property
    def drafters(self) -> Mapping[str, DraftEngine]:
        """The drafters of the bundle's methods by the method's name; those without a neural drafter have none."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether it leaves the host free while a device executes."""
        ...

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Features | None]:
        """Run one target forward. Gives logits or tokens of its logit rows and, where the bundle drafts, the features
        [T, F] of all rows, which drafters read.

        A sequence's sampler is plain and stands, with its grammar, at the sequence's first logit row. For such a
        sequence an engine may give the tokens that the sampler would choose at its logit rows, each masked by its own
        path, instead of their logits. Without `samplers` all rows give logits. Both results are valid until the next
        call of the engine or a drafter.

        If the engine `overlaps`, it calls `meanwhile` once, when the device has all the work of the step, and before
        the host waits for it. Others are given none.
        """
        ...

    @property
    def reuse_refusal(self) -> str | None:
        """Why a slot's rows do not serve other sequences, as a clause; None: they do, and `copy` works."""
        ...

    @property
    def step_shapes(self) -> Sequence[tuple[int, int]]:
        """The shapes that steps are padded to, sequences and rows of each; empty where steps are executed as they
        are."""
        ...

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a slot's cache to another slot, and of the drafters' caches one row more: pairs
        may begin before the text."""
        ...

    def close(self) -> None:
        """Free the networks and the caches."""
        ...


class EngineAround:
    """An engine that does all as another one does, but for what a subclass does in another way."""

    def __init__(self, engine: Engine):
        self._engine = engine

    @property
    def drafters(self) -> Mapping[str, DraftEngine]:
        """See `Engine.drafters`."""
        return self._engine.drafters

    @property
    def overlaps(self) -> bool:
        """See `Engine.overlaps`."""
        return self._engine.overlaps

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Features | None]:
        """See `Engine.execute`."""
        return self._engine.execute(batch, samplers, meanwhile)

    @property
    def reuse_refusal(self) -> str | None:
        """See `Engine.reuse_refusal`."""
        return self._engine.reuse_refusal

    @property
    def step_shapes(self) -> Sequence[tuple[int, int]]:
        """See `Engine.step_shapes`."""
        return self._engine.step_shapes

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""
        self._engine.copy(source, target, rows)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()


class DraftEngine(Protocol):
    """The drafter of one method."""

    @property
    def reads_context(self) -> bool:
        """Whether it takes every pair of a sequence: see `DraftBatch`."""
        ...

    @property
    def reads_text(self) -> bool:
        """Whether the pairs begin with the sequence's first token. No features precede it: any may stand there."""
        ...

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """Draft for the whole batch, in one call: the most likely tokens, or where the network takes the target's noise
        those that it favours. None: all sequences are greedy."""
        ...


@runtime_checkable
class ResamplingEngine(DraftEngine, Protocol):
    """A drafter that drafts again from the rest of the chains of earlier drafts."""

    def resample(
        self, chains: list[np.ndarray], roots: np.ndarray, noise: SharedNoise | None = None
    ) -> DraftCandidates:
        """Draft below new roots int32 [B], in one call. A chain, float32 [n, K], is the raw logits of the n levels
        below its root. Log-probabilities of deeper levels are -inf. `noise`: see `draft`; that of the new positions."""
        ...


@runtime_checkable
class DrawingEngine(DraftEngine, Protocol):
    """A drafter whose network draws at random."""

    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """Draw for the whole batch, in one call."""
        ...
