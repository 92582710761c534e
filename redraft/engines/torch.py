"""The `torch` backend: exported programs, on CUDA where there is a device, else on the CPU. The reference in tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import plugins.all_reduce.torch_op
import plugins.tree_attention.torch_op  # noqa: F401 (both register operators that the programs call)
from redraft.bundle import Bundle, BundleConfig, MethodInfo, target_folder
from redraft.engines.interface import DraftBatch, DraftCandidates, DraftDraws, DraftSampling, TargetBatch
from redraft.engines.rows import PairBuffers, RowBuffers, SamplingBuffers

CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchEngine:
    """A bundle's programs, and caches in the bundle's precision. Of several ranks, one's: see `OpenVINOEngine`."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rank: int = 0):
        if threads is not None:
            torch.set_num_threads(threads)
        config = bundle.config
        target, limits = config.target, config.limits
        self._target = _load(target_folder(bundle.path, rank, config.tensor_parallel) / "target.pt2")
        self._rows = RowBuffers(limits, target.vocab_size)
        heads = config.kv_heads(rank), target.head_size
        self.caches = [_allocate(config, *heads, target.num_layers, limits.max_tree) for _ in "kv"]
        methods = {name: method for name, method in config.methods.items() if method.drafter and rank == 0}
        self.drafters = {name: TorchDrafter(bundle, name, method) for name, method in methods.items()}

    @torch.inference_mode()
    def execute(self, batch: TargetBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits."""
        rows = {name: _tensor(array) for name, array in self._rows.fill(batch).items()}
        input_ids, logit_rows = rows.pop("input_ids"), rows.pop("logit_rows")
        outputs = [_array(x) for x in self._target(input_ids, list(rows.values()), logit_rows, *self.caches)]
        return outputs[0][: len(batch.logit_rows)], outputs[1] if len(outputs) > 1 else None

    def close(self) -> None:
        """Free the programs and the caches."""
        del self._target
        self.caches, self.drafters = [], {}


class TorchDrafter:
    """The drafter of one method: its program, and its context cache if it reads one."""

    def __init__(self, bundle: Bundle, name: str, method: MethodInfo):
        config, context = bundle.config, method.context
        self.reads_context = context is not None
        self.reads_text = context is not None and context.from_text
        self.caches: list[torch.Tensor] = []
        if context:
            heads = context.num_kv_heads, context.head_size
            self.caches = _allocate(config, *heads, 2 * context.layers, context.draft_rows)
        self._program = _load(bundle.path / f"drafter.{name}.pt2")
        self._pairs = PairBuffers(config.limits, config.target, self.reads_context)
        self._sampling = SamplingBuffers.of(method, config.limits.slots)

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftCandidates:
        """See `DraftEngine.draft`. Raises RuntimeError where the drafter draws at random, ValueError for a batch that
        does not fit it."""
        if self._sampling is not None:
            raise RuntimeError("this drafter draws at random: it gives no candidates")
        inputs = [_tensor(array) for array in self._pairs.fill(batch).values()]
        outputs = self._program([*inputs, *self.caches])
        candidates, log_probs, parents, *raw_logits = (output.cpu().numpy() for output in outputs)
        kept = raw_logits[0].reshape(*candidates.shape[:2], -1) if raw_logits else None
        return DraftCandidates(candidates, log_probs, parents, kept)

    @torch.inference_mode()
    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """See `DrawingEngine.draw`. Raises as `draft` does, and where the drafter does not draw at random."""
        if self._sampling is None:
            raise RuntimeError("this drafter does not draw at random")
        pairs, filters = self._pairs.fill(batch), self._sampling.fill(sampling, len(batch.slots))
        inputs, drawing = ([_tensor(array) for array in given.values()] for given in (pairs, filters))
        outputs = self._program([*inputs, *self.caches, *drawing])
        return DraftDraws(*(output.cpu().numpy() for output in outputs))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _allocate(config: BundleConfig, kv_heads: int, head_size: int, count: int, draft_rows: int) -> list[torch.Tensor]:
    limits = config.limits
    shape = (limits.slots, kv_heads, limits.max_len + draft_rows, head_size)
    return [torch.zeros(shape, dtype=CACHE_DTYPES[config.precision], device=_device()) for _ in range(count)]


def _load(program: Path) -> torch.nn.Module:
    return torch.export.load(program).module().to(_device())


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(_device())


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()
