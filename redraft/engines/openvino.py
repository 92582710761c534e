"""The `openvino` backend: networks in plugin form on the CPU, their operators from plugins/, the KV cache in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov

from plugins import kernels
from plugins.library import extension_path
from plugins.program import ALIGNMENT, CONSTANTS
from redraft.bundle import Bundle, BundleConfig, BundleError
from redraft.engines.interface import DraftBatch, DraftCandidates, TargetBatch
from redraft.engines.rows import RowBuffers

COMPILE_OPTIONS = {
    # The operators bring their own threads; activations are float32 in every precision.
    "INFERENCE_PRECISION_HINT": "f32",
    "INFERENCE_NUM_THREADS": 1,
    "ENABLE_CPU_PINNING": False,
    "NUM_STREAMS": 1,
}
SENTINEL = 3.0


class OpenVINOEngine:
    """A bundle's networks, compiled at load; `execute` and `draft` allocate nothing that lasts."""

    def __init__(self, bundle: Bundle, threads: int | None = None):
        config = bundle.config
        if threads is not None:
            kernels.set_threads(threads)
        core = ov.Core()
        core.add_extension(str(extension_path()))
        self._weights: list[np.ndarray] = []
        self._target = self._compile(core, bundle.path / "target.onnx")
        has_drafter = (bundle.path / "drafter.onnx").exists()
        self._drafter = self._compile(core, bundle.path / "drafter.onnx") if has_drafter else None
        self._rows = RowBuffers(config.limits, config.target.vocab_size)
        self._hidden = np.zeros((config.limits.slots, config.target.hidden_size), np.float32)
        self._roots = np.zeros(config.limits.slots, np.int32)
        self._bound: dict[str, tuple[int, ...]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], ov.Tensor] = {}
        self._has_hidden = any("hidden" in output.names for output in self._target.model_outputs)
        self.caches = _allocate_caches(config)
        for name, cache in self.caches.items():
            self._target.set_tensor(name, _shared(cache))
        self._self_test(bundle)

    def execute(self, batch: TargetBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits."""
        self._bind(self._target, self._rows.fill(batch))
        if failure := _infer(self._target):
            self._rows.check(batch)
            raise RuntimeError(f"the target's network failed: {failure}")
        logits = self._target.get_tensor("logits").data[: len(batch.logit_rows)]
        return logits, self._target.get_tensor("hidden").data if self._has_hidden else None

    def draft(self, batch: DraftBatch) -> DraftCandidates:
        """See `Engine.draft`. Raises RuntimeError where the bundle has no drafter, or its network fails, and
        ValueError for more sequences than the bundle has slots."""
        if self._drafter is None:
            raise RuntimeError("this bundle has no drafter")
        count, slots = len(batch.tokens), len(self._roots)
        if not 1 <= count == len(batch.hidden) <= slots:
            raise ValueError(
                f"{len(batch.hidden)} hidden states, {count} root tokens: expected one of each for 1 to {slots}"
            )
        self._hidden[:count], self._roots[:count] = batch.hidden, batch.tokens
        self._bind(self._drafter, {"hidden": self._hidden[:count], "tokens": self._roots[:count]})
        if failure := _infer(self._drafter):
            raise RuntimeError(f"the drafter's network failed: {failure}")
        outputs = (self._drafter.get_tensor(name).data for name in ("candidates", "log_probs", "parents"))
        return DraftCandidates(*outputs)

    def close(self) -> None:
        """Free the networks and the cache."""
        self._views.clear()
        self._target = self._drafter = None
        self._weights.clear()
        self.caches = {}

    def _compile(self, core: ov.Core, network: Path) -> ov.InferRequest:
        """A request of a network. Its weights are bound to it and stay ours: OpenVINO does not keep them alive."""
        request = core.compile_model(network, "CPU", COMPILE_OPTIONS).create_infer_request()
        weights = network.with_suffix(".weights")
        if weights.exists():
            self._weights.append(_read_aligned(weights))
            request.set_tensor(CONSTANTS, ov.Tensor(self._weights[-1], shared_memory=True))
        return request

    def _bind(self, request: ov.InferRequest, inputs: dict[str, np.ndarray]) -> None:
        """Set inputs whose shape is not the last one's; the two networks have no name in common."""
        for name, array in inputs.items():
            if self._bound.get(name) != array.shape:
                request.set_tensor(name, self._view(name, array))
                self._bound[name] = array.shape

    def _view(self, name: str, array: np.ndarray) -> ov.Tensor:
        """A tensor over a buffer's first rows, made once for every number of rows."""
        key = (name, array.shape)
        if key not in self._views:
            self._views[key] = ov.Tensor(array, shared_memory=True)
        return self._views[key]

    def _self_test(self, bundle: Bundle) -> None:
        """Plant a sentinel behind a cached row and commit it: it must arrive in our own arrays, in every layer."""
        for cache in self.caches.values():
            cache[-1, :, 1] = _as_stored(SENTINEL, cache.dtype)
        slot = bundle.config.limits.slots - 1
        self.execute(
            TargetBatch(
                input_ids=np.zeros(1, np.int32),
                positions=np.ones(1, np.int32),
                row_offsets=np.array([0, 1], np.int32),
                slots=np.array([slot], np.int32),
                cache_lengths=np.array([1], np.int32),
                tree_mask=np.zeros((1, self._rows.mask_words), np.int32),
                commit_src=np.array([1], np.int32),
                commit_offsets=np.array([0, 1], np.int32),
                logit_rows=np.zeros(1, np.int32),
            )
        )
        for name, cache in self.caches.items():
            if not (cache[slot, :, 0] == _as_stored(SENTINEL, cache.dtype)).all():
                raise BundleError(
                    f"{bundle.path}: the engine does not update {name} in place with this OpenVINO version"
                )
            cache[slot, :, :2] = 0


def _infer(request: ov.InferRequest) -> str | None:
    """Execute a network; an operator's error. With one thread OpenVINO loses it and leaves the outputs as they were."""
    kernels.take_failure()
    request.infer()
    return kernels.take_failure()


def _read_aligned(path: Path) -> np.ndarray:
    """A file's bytes as uint8, aligned for the kernels, in memory that numpy lets the system map as huge pages."""
    size = path.stat().st_size
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    aligned = buffer[start : start + size]
    with path.open("rb", buffering=0) as file:
        read = 0
        while read < size and (count := file.readinto(aligned[read:].data)):
            read += count
    return aligned


def _allocate_caches(config: BundleConfig) -> dict[str, np.ndarray]:
    """Zeros [slots, kv_heads, rows, head_size] by input name, in memory that is already there: float32 in fp32
    bundles, else the uint16 bits of bf16."""
    target, limits = config.target, config.limits
    shape = (limits.slots, target.num_kv_heads, limits.max_len + limits.max_tree, target.head_size)
    dtype = np.float32 if config.precision == "fp32" else np.uint16
    return {f"{kind}_cache.{layer}": np.full(shape, 0, dtype) for layer in range(target.num_layers) for kind in "kv"}


def _shared(cache: np.ndarray) -> ov.Tensor:
    if cache.dtype == np.uint16:
        return ov.Tensor(cache, ov.Shape(cache.shape), ov.Type.bf16)
    return ov.Tensor(cache, shared_memory=True)


def _as_stored(value: float, dtype: np.dtype) -> np.generic:
    if dtype == np.uint16:
        return np.float32(value).view(np.uint32) >> np.uint32(16)
    return np.float32(value)
