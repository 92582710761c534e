"""The `torch` backend: exported programs, on CUDA where there is a device, else on the CPU. The reference in tests."""

from __future__ import annotations

import numpy as np
import torch

import plugins.tree_attention.torch_op  # noqa: F401 (registers the operator that the programs call)
from redraft.bundle import Bundle, BundleConfig
from redraft.engines.interface import DraftBatch, DraftCandidates, DraftDraws, DraftSampling, TargetBatch
from redraft.engines.rows import PairBuffers, RowBuffers, SamplingBuffers

CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchEngine:
    """A bundle's programs, and caches in the bundle's precision."""

    def __init__(self, bundle: Bundle, threads: int | None = None):
        if threads is not None:
            torch.set_num_threads(threads)
        config = bundle.config
        target, limits = config.target, config.limits
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._target = self._load(bundle, "target")
        self._drafter = self._load(bundle, "drafter")
        self._rows = RowBuffers(limits, target.vocab_size)
        self._context = context = config.drafting.context if config.drafting else None
        self._pairs = PairBuffers(limits, target, self.reads_context)
        self._sampling = SamplingBuffers.of(config)
        self.caches = [self._allocate(config, target.num_layers, limits.max_tree) for _ in "kv"]
        self.drafter_caches: list[torch.Tensor] = []
        if context:
            self.drafter_caches = self._allocate(config, 2 * context.layers, context.draft_rows)

    @property
    def reads_context(self) -> bool:
        """See `Engine.reads_context`."""
        return self._context is not None

    @property
    def reads_text(self) -> bool:
        """See `Engine.reads_text`."""
        return self._context is not None and self._context.from_text

    @torch.inference_mode()
    def execute(self, batch: TargetBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits."""
        rows = {name: self._tensor(array) for name, array in self._rows.fill(batch).items()}
        input_ids, logit_rows = rows.pop("input_ids"), rows.pop("logit_rows")
        assert self._target is not None
        outputs = [self._array(x) for x in self._target(input_ids, list(rows.values()), logit_rows, *self.caches)]
        return outputs[0][: len(batch.logit_rows)], outputs[1] if len(outputs) > 1 else None

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftCandidates:
        """See `Engine.draft`. Raises RuntimeError where the bundle has no drafter, ValueError for a batch that does not
        fit it."""
        if self._drafter is None:
            raise RuntimeError("this bundle has no drafter")
        if self._sampling is not None:
            raise RuntimeError("this bundle's drafter draws at random: it gives no candidates")
        inputs = [self._tensor(array) for array in self._pairs.fill(batch).values()]
        outputs = self._drafter([*inputs, *self.drafter_caches])
        candidates, log_probs, parents, *raw_logits = (output.cpu().numpy() for output in outputs)
        kept = raw_logits[0].reshape(*candidates.shape[:2], -1) if raw_logits else None
        return DraftCandidates(candidates, log_probs, parents, kept)

    @torch.inference_mode()
    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """See `DrawingEngine.draw`. Raises as `draft` does, and where the bundle's drafter does not draw at random."""
        if self._drafter is None or self._sampling is None:
            raise RuntimeError("this bundle has no drafter that draws at random")
        pairs, filters = self._pairs.fill(batch), self._sampling.fill(sampling, len(batch.slots))
        inputs, drawing = ([self._tensor(array) for array in given.values()] for given in (pairs, filters))
        outputs = self._drafter([*inputs, *self.drafter_caches, *drawing])
        return DraftDraws(*(output.cpu().numpy() for output in outputs))

    def close(self) -> None:
        """Free the programs and the cache."""
        self._target = self._drafter = None
        self.caches, self.drafter_caches = [], []

    def _allocate(self, config: BundleConfig, count: int, draft_rows: int) -> list[torch.Tensor]:
        target, limits = config.target, config.limits
        shape = (limits.slots, target.num_kv_heads, limits.max_len + draft_rows, target.head_size)
        return [torch.zeros(shape, dtype=CACHE_DTYPES[config.precision], device=self._device) for _ in range(count)]

    def _load(self, bundle: Bundle, name: str) -> torch.nn.Module | None:
        path = bundle.path / f"{name}.pt2"
        return torch.export.load(path).module().to(self._device) if path.exists() else None

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    @staticmethod
    def _array(tensor: torch.Tensor) -> np.ndarray:
        return tensor.float().cpu().numpy()
