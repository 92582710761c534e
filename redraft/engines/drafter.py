"""What the drafters of all engines do alike: which calls a method's network answers, and its inputs on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from redraft.batch import DraftBatch, DraftCandidates, DraftDraws, DraftSampling, SharedNoise
from redraft.bundle.config import BundleConfig
from redraft.bundle.method import MethodConfig
from redraft.engines.host_buffers import ChainBuffers, NoiseBuffers, PairBuffers, SamplingBuffers

CANDIDATES = ("candidates", "log_probs", "parents")
"""Outputs of a beam search; of a drafter whose chains are drafted from again, `raw_logits` after them."""
DRAWS = ("ids", "log_probs", "draws")
"""Outputs of random draws."""


class NetworkDrafter(ABC):
    """The drafter of one method: `DraftEngine`, `DrawingEngine` and `ResamplingEngine` over an engine's networks."""

    def __init__(self, config: BundleConfig, method: MethodConfig):
        limits, context = config.limits, method.context
        self.reads_context = context is not None
        self.reads_text = context is not None and context.from_text
        self._pairs = PairBuffers(limits, config.target, self.reads_context)
        self._sampling = SamplingBuffers.of(method, limits.slots)
        self._noise = NoiseBuffers.of(method, limits.slots)
        self._levels = method.chain_levels
        self._chains = ChainBuffers(limits.slots, self._levels) if self._levels else None

    @abstractmethod
    def _run(self, batch: DraftBatch, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]) -> list[np.ndarray]:
        """Run the network on a batch that fits the bundle, with further inputs, and return some of its outputs."""

    @abstractmethod
    def _run_resampler(self, inputs: dict[str, np.ndarray], count: int) -> list[np.ndarray]:
        """Run the re-sampling network for `count` sequences and return CANDIDATES."""

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """See `DraftEngine.draft`. Raises RuntimeError where the drafter draws at random or its network fails,
        ValueError for a batch that does not fit the bundle."""
        if self._sampling is not None:
            raise RuntimeError("this drafter draws at random: it gives no candidates")
        self._pairs.check(batch)
        names = (*CANDIDATES, "raw_logits") if self._levels else CANDIDATES
        candidates, log_probs, parents, *chains = self._run(batch, self._noise_inputs(noise, len(batch.slots)), names)
        raw_logits = chains[0].reshape(*candidates.shape[:2], -1) if chains else None
        return DraftCandidates(candidates, log_probs, parents, raw_logits)

    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """See `DrawingEngine.draw`. Raises as `draft` does, and where the drafter does not draw at random."""
        if self._sampling is None:
            raise RuntimeError("this drafter does not draw at random")
        self._pairs.check(batch)
        return DraftDraws(*self._run(batch, self._sampling.fill(sampling, len(batch.slots)), DRAWS))

    def resample(
        self, chains: list[np.ndarray], roots: np.ndarray, noise: SharedNoise | None = None
    ) -> DraftCandidates:
        """See `ResamplingEngine.resample`. Raises RuntimeError where the drafter leaves no chains or the network fails,
        ValueError for chains that do not fit it."""
        if self._chains is None:
            raise RuntimeError("this drafter leaves no chain to draft again from")
        inputs = self._chains.fill(chains, roots) | self._noise_inputs(noise, len(chains))
        candidates, log_probs, parents = self._run_resampler(inputs, len(chains))
        for scores, chain in zip(log_probs, chains, strict=True):
            scores[len(chain) :] = -np.inf  # the buffer's other levels hold earlier chains
        return DraftCandidates(candidates, log_probs, parents)

    def _noise_inputs(self, noise: SharedNoise | None, count: int) -> dict[str, np.ndarray]:
        return {} if self._noise is None else self._noise.fill(noise, count)
