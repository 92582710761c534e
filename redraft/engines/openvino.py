"""The `openvino` backend: networks in plugin form on the CPU, their operators from plugins/, the KV cache in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov

from redraft.batch import DraftBatch, TargetBatch
from redraft.bundle.config import BundleConfig, target_folder
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.engines.api import Gather, Meanwhile, Samplers, forbid_unknown, local_logits
from redraft.engines.cache_rows import copy_rows
from redraft.engines.drafter import CANDIDATES, NetworkDrafter
from redraft.engines.host_buffers import RowBuffers
from redraft.errors import BundleError
from redraft.operator_build import build_operators
from redraft.plugins import kernels
from redraft.plugins.library import extension_path, operators_digest
from redraft.plugins.operators.program import ALIGNMENT, CONSTANTS

COMPILE_OPTIONS = {
    # The operators bring their own threads; activations are float32 in every precision.
    "INFERENCE_PRECISION_HINT": "f32",
    "INFERENCE_NUM_THREADS": 1,
    "ENABLE_CPU_PINNING": False,
    "NUM_STREAMS": 1,
}
SENTINEL = 3.0


class OpenVINOEngine:
    """A bundle's networks, compiled at load; no call allocates anything that lasts. Of several ranks this is the engine
    of one: drafters are on rank 0, and each rank computes logits of its own columns, which `gather` brings to rank
    0."""

    reuse_refusal = None
    overlaps = False
    step_shapes: tuple[tuple[int, int], ...] = ()

    def __init__(self, bundle: Bundle, threads: int | None = None, rank: int = 0, gather: Gather = local_logits):
        self._bundle, config, self.gather = bundle, bundle.config, gather
        if (built_for := bundle.manifest.versions.get("operators")) != (present := operators_digest()):
            raise BundleError(
                f"{bundle.path} was built for other CPU operators ({built_for}) than these ({present}); "
                f"{bundle.manifest.rebuild}"
            )
        build_operators()
        if threads is not None:
            kernels.set_threads(threads)
        core = ov.Core()
        core.add_extension(str(extension_path()))
        folder = target_folder(bundle.path, rank, config.tensor_parallel)
        rows = [config.cache_rows(layer) for layer in range(config.target.num_layers)]
        self.caches = _allocate_caches(config, config.kv_heads(rank), config.target.head_size, rows)
        weights = _read_aligned(folder / "target.weights")
        self._target = _Network(core, folder / "target.onnx", self.caches, weights)
        self._rows = RowBuffers(config.limits, config.target.vocab_size)
        methods = {name: method for name, method in config.methods.items() if method.drafter and rank == 0}
        shared = _read_aligned(bundle.path / "drafters.weights") if methods else weights
        self.drafters = {name: OpenVINODrafter(core, bundle, name, method, shared) for name, method in methods.items()}
        self._has_features = self._target.gives("features")
        if config.tensor_parallel == 1:
            self.self_test()

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """See `Engine.execute`: logits of all rows, as verification looks at few. Raises ValueError for a batch outside
        of the bundle's limits."""
        if failure := self._target.infer(self._rows.fill(batch)):
            self._rows.check(batch)
            raise RuntimeError(f"the target's network failed: {failure}")
        logits = self.gather(self._target.output("logits")[: len(batch.logit_rows)])
        forbid_unknown(logits, self._bundle.config.target.unknown_tokens)
        return logits, self._target.output("features") if self._has_features else None

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""
        copy_rows(self.caches.values(), source, target, rows)
        for drafter in self.drafters.values():
            copy_rows(drafter.caches.values(), source, target, rows + 1)

    def close(self) -> None:
        """Free the networks and the caches."""
        del self._target
        self.caches, self.drafters = {}, {}

    def self_test(self) -> None:
        """Plant a sentinel after a cached row and commit it: it must arrive in our own arrays, in every layer. Several
        ranks do it together, when all are loaded. Raises BundleError."""
        slot = 0  # the first requests' own: clearing the memory of another one takes as long as all else here
        for cache in self.caches.values():
            cache[slot, :, 1] = _as_stored(SENTINEL, cache.dtype)
        row = TargetBatch.chains(np.zeros((1, 1)), np.array([slot]), np.ones(1), self._rows.mask_words)
        commit = {"commit_src": np.array([1], np.int32), "commit_offsets": np.array([0, 1], np.int32)}
        self.execute(replace(row, **commit))
        for name, cache in self.caches.items():
            if not (cache[slot, :, 0] == _as_stored(SENTINEL, cache.dtype)).all():
                raise BundleError(
                    f"{self._bundle.path}: the engine does not update {name} in place with this OpenVINO version"
                )
            cache[slot, :, :2] = 0


class OpenVINODrafter(NetworkDrafter):
    """The drafter of one method: its network, and its context cache if it reads one."""

    def __init__(self, core: ov.Core, bundle: Bundle, name: str, method: MethodConfig, weights: np.ndarray):
        super().__init__(bundle.config, method)
        config, context = bundle.config, method.context
        self.caches: dict[str, np.ndarray] = {}
        if context:
            rows = [config.limits.max_len + context.draft_rows] * context.layers
            self.caches = _allocate_caches(config, context.num_kv_heads, context.head_size, rows)
        self._network = _Network(core, bundle.path / f"drafter.{name}.onnx", self.caches, weights)
        if self._levels:
            self._resampler = _Network(core, bundle.path / f"resampler.{name}.onnx", {}, weights)

    def _run(self, batch: DraftBatch, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]) -> list[np.ndarray]:
        if failure := self._network.infer(self._pairs.fill(batch) | inputs):
            raise RuntimeError(f"the drafter's network failed: {failure}")
        return [self._network.output(name) for name in outputs]

    def _run_resampler(self, inputs: dict[str, np.ndarray], count: int) -> list[np.ndarray]:
        if failure := self._resampler.infer(inputs):
            raise RuntimeError(f"the re-sampling network failed: {failure}")
        return [self._resampler.output(name) for name in CANDIDATES]


class _Network:
    """A compiled network, its inputs bound to our buffers. `weights` hold its own, and may hold others'."""

    def __init__(self, core: ov.Core, path: Path, caches: dict[str, np.ndarray], weights: np.ndarray):
        self._request = core.compile_model(path, "CPU", COMPILE_OPTIONS).create_infer_request()
        self._bound: dict[str, tuple[int, ...]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], ov.Tensor] = {}
        self._caches = caches
        for name, cache in caches.items():
            self._request.set_tensor(name, _shared(cache))
        self._weights = weights
        # They stay ours: OpenVINO does not keep them alive.
        self._request.set_tensor(CONSTANTS, ov.Tensor(weights, shared_memory=True))

    def gives(self, name: str) -> bool:
        """Whether the network has this output."""
        return any(name in output.names for output in self._request.model_outputs)

    def infer(self, inputs: dict[str, np.ndarray]) -> str | None:
        """Execute with these inputs, always first rows of the same buffers. Returns an operator's error; with one
        thread OpenVINO loses it and leaves the outputs as they were."""
        for name, array in inputs.items():
            if self._bound.get(name) != array.shape:
                self._request.set_tensor(name, self._view(name, array))
                self._bound[name] = array.shape
        kernels.take_failure()
        self._request.infer()
        return kernels.take_failure()

    def output(self, name: str) -> np.ndarray:
        """A view that stays valid until the next `infer`."""
        return self._request.get_tensor(name).data

    def _view(self, name: str, array: np.ndarray) -> ov.Tensor:
        """A tensor over a buffer's first rows, made once for every number of rows."""
        key = (name, array.shape)
        if key not in self._views:
            self._views[key] = ov.Tensor(array, shared_memory=True)
        return self._views[key]


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


def _allocate_caches(config: BundleConfig, kv_heads: int, head_size: int, rows: list[int]) -> dict[str, np.ndarray]:
    """Zeros [slots, kv_heads, rows of the layer, head_size] by input name: float32 in fp32 bundles, else the uint16
    bits of bf16. The system gives memory as rows are first written: a long context costs what is used of it."""
    dtype = np.float32 if config.precision == "fp32" else np.uint16
    shapes = [(config.limits.slots, kv_heads, count, head_size) for count in rows]
    return {f"{kind}_cache.{layer}": np.zeros(shape, dtype) for layer, shape in enumerate(shapes) for kind in "kv"}


def _shared(cache: np.ndarray) -> ov.Tensor:
    return ov.Tensor(cache.view(np.uint8) if cache.dtype == np.uint16 else cache, shared_memory=True)


def _as_stored(value: float, dtype: np.dtype) -> np.generic:
    if dtype == np.uint16:
        return np.float32(value).view(np.uint32) >> np.uint32(16)
    return np.float32(value)
