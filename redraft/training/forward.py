"""The target's pass over several sequences at once, as `redraft distill` runs it: by the torch module or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from redraft.batch import TargetBatch
from redraft.engines import load_engine
from redraft.engines.features import on_host
from redraft.model_defs.target.attention import DenseCache
from redraft.model_defs.target.model import Target


class Forward(Protocol):
    """The target over `slots` sequences of at most `length` tokens, in a cache of its own."""

    slots: int
    length: int
    device: torch.device
    """Where the logits are"""
    keeps_rows: bool
    """Whether a slot's first rows are still there after a long text"""

    def __call__(
        self, tokens: list[list[int]], lengths: list[int], wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append equally many tokens to every slot of `lengths` cached rows: features bfloat16 [slots, n, F], of which
        the first H are the hidden states, and the logits [wanted, V] that follow the last token of the `wanted`
        slots."""
        ...


class TorchForward:
    """Through the torch module."""

    def __init__(self, target: Target, slots: int, length: int):
        self.target, self.slots, self.length = target, slots, length
        self.device, self.keeps_rows = target.embedding.weight.device, True
        self.cache = DenseCache(target.config, slots, length, target.embedding.weight)

    def __call__(
        self, tokens: list[list[int]], lengths: list[int], wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.starts.copy_(torch.tensor(lengths))
        self.cache.longest = max(lengths) + len(tokens[0])
        positions = self.cache.positions(len(tokens[0]))
        states = self.target(torch.tensor(tokens, device=self.device), self.cache.attend, positions=positions)
        return states.features.to(torch.bfloat16).cpu(), self.target.lm_head(states.hidden[wanted, -1])


class EngineForward:
    """Through an engine bundle without drafters, built with --features: the target as it will be served writes the
    teacher data."""

    def __init__(self, path: Path, threads: int | None):
        """Raises ValueError where the bundle cannot be loaded or gives no features."""
        from redraft.bundle.manifest import Bundle
        from redraft.decoding.token_tree import mask_width
        from redraft.errors import BundleError

        try:
            bundle = Bundle.load(path)
            self.engine = load_engine(bundle, threads)
        except BundleError as error:
            raise ValueError(str(error)) from None
        self.device = torch.device("cpu")
        limits = bundle.config.limits
        self.slots, self.length, self.keeps_rows = limits.slots, limits.max_len, not limits.window_rows
        self.feature_size = bundle.config.target.feature_size
        self.mask_words = mask_width(limits.max_tree)
        self([[0]] * self.slots, [0] * self.slots, [])

    def __call__(
        self, tokens: list[list[int]], lengths: list[int], wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, starts = np.array(tokens, np.int32), np.array(lengths, np.int32)
        slots, n = ids.shape
        logit_rows = np.array(wanted, np.int32) * n + n - 1
        batch = TargetBatch.chains(ids, np.arange(slots), starts, self.mask_words, logit_rows)
        logits, hidden = self.engine.execute(batch)
        if hidden is None:
            raise ValueError("the engine gives no features: build it with --features")
        states = torch.from_numpy(on_host(hidden[: slots * n])).to(torch.bfloat16)
        return states.view(slots, n, -1), torch.from_numpy(np.asarray(logits))
