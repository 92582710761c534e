"""The backends `tensorrt` and `tensorrt_rtx`: serialized engines, caches in torch tensors.

A step is enqueued on its own stream, as a CUDA graph that was captured at load, and its tokens are sampled there. The
host waits once, for the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from redraft.batch import TargetBatch
from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo, target_folder
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import ContextInfo
from redraft.decoding.token_tree import mask_width
from redraft.engines import memory
from redraft.engines.api import Gather, LogitRows, Meanwhile, Samplers, forbid_unknown, local_logits
from redraft.engines.cache_check import fault
from redraft.engines.cache_rows import copy_rows
from redraft.engines.cuda import device as gpu
from redraft.engines.cuda.sampling import draws_on, sample
from redraft.engines.cuda.transfer import Results
from redraft.engines.tensorrt.drafter import TensorRTDrafter
from redraft.engines.tensorrt.library import LIBRARIES, TensorRTLibrary, require_fit
from redraft.engines.tensorrt.session import Stream
from redraft.engines.tensorrt.target import NativeTarget, PluginTarget
from redraft.errors import BundleError
from redraft.plugins.operators.all_reduce import nccl

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of TensorRT for RTX by precision; fp16 for all others."""


def dtype_of(library: TensorRTLibrary, precision: str) -> torch.dtype:
    """The dtype of caches and of all that is not quantized. Full TensorRT takes bf16, as our kernels do."""
    return torch.bfloat16 if library.builds_on_gpu else DTYPES.get(precision, torch.float16)


class TensorRTEngine:
    """A bundle's engines and caches on one GPU; of several ranks, the engine of one (see `OpenVINOEngine`)."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rank: int = 0, gather: Gather = local_logits):
        """`threads` are for torch on the host. Raises BundleError where library, driver or GPU are missing or not those
        that the bundle was built for, or memory does not suffice."""
        if threads is not None:
            torch.set_num_threads(threads)
        library = LIBRARIES[bundle.config.backend.name]
        module, device = library.module(), gpu.device()
        library.require_gpu(device)
        require_fit(bundle, library, str(module.__version__), device)
        gpu.require_precision(device, bundle.config.precision)
        self.overlaps = device.type == "cuda"
        self._stream, self._results, self._draws = Stream(device), Results(device), draws_on(device)
        self._bundle, self.gather = bundle, gather
        self._within_memory = partial(memory.within, bundle, rank, ".engine", gpu.free_bytes(device))
        with self._stream.current(), self._within_memory():
            self._load(bundle, library, rank)
        if bundle.config.tensor_parallel == 1:
            self.self_test()

    def _load(self, bundle: Bundle, library: TensorRTLibrary, rank: int) -> None:
        config, stream = bundle.config, self._stream
        dtype = dtype_of(library, config.precision)
        limits, target = config.limits, memory.of_rank(config, rank).target
        path = target_folder(bundle.path, rank, config.tensor_parallel) / "target.engine"
        communicator = nccl.communicator() if config.tensor_parallel > 1 else None
        self.caches: list[Tensor] | Tensor
        self._target: PluginTarget | NativeTarget
        if config.plugin_form:
            self.caches = caches = _allocate_layers(config, target, dtype, stream)
            self._target = PluginTarget(path, config, library, caches, stream, communicator)
        else:
            self.caches = whole = _allocate(limits, target, target.num_layers, limits.max_tree, dtype, stream)
            self._target = NativeTarget(path, config, library, whole, stream, communicator)
        self.drafters = {}
        methods = {name: method for name, method in config.methods.items() if method.drafter and rank == 0}
        for name, method in methods.items():
            context = method.context
            own = _allocate(limits, context, context.layers, context.draft_rows, dtype, stream) if context else None
            drafter = self.drafters[name] = TensorRTDrafter(bundle, library, name, own, stream, self._within_memory)
            drafter.make_ready()
            self._refuse(f"the engine of {name}", drafter.fault())

    def _refuse(self, engine: str, fault: str | None) -> None:
        """Raise BundleError where an engine has a fault."""
        if fault:
            raise BundleError(f"{self._bundle.path}: {engine} {fault}; {self._bundle.manifest.rebuild}")

    @torch.inference_mode()
    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Tensor | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits, BundleError where
        memory does not suffice for a step of a new bucket."""
        with self._stream.current(), self._within_memory():
            logits, features = self._target.execute(batch)
            logits = forbid_unknown(self.gather(logits), self._bundle.config.target.unknown_tokens)
            return sample(logits, batch, samplers, self._results, self._draws, meanwhile), features

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """See `Engine.step_shapes`."""
        return self._target.step_shapes

    @property
    def reuse_refusal(self) -> str | None:
        """See `Engine.reuse_refusal`."""
        if self._bundle.config.plugin_form and not any(drafter.reads_context for drafter in self.drafters.values()):
            return None
        return (
            "a step in native form, and a draft with a context, execute all slots up to the last one in their batch: "
            "requests take the first free slots, not those that hold their prefixes"
        )

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`. Drafters have nothing to copy: see `reuse_refusal`."""
        with self._stream.current():
            copy_rows(self.caches, source, target, rows)

    def close(self) -> None:
        """Free the engines and the caches, as far as they are there."""
        self._stream.synchronize()
        for name in ("_target", "caches"):
            vars(self).pop(name, None)
        self.drafters = {}

    def self_test(self) -> None:
        """Make all steps ready; then see that a step of one row and one of more rows than a tree's (in native form: a
        prefill chunk; in plugin form: once more by the prefill profile) write these rows in the last slot of every
        cache, and no others. Ranks do it together, when all are loaded, as each context joins them anew. Says on stderr
        where a layer copies a cache. Raises BundleError."""
        bundle, limits = self._bundle, self._bundle.config.limits
        with self._stream.current(), self._within_memory():
            self._target.session.make_ready({"write_indices": limits.max_len})
            padded = 0 if bundle.config.plugin_form else limits.max_tree
            most = min(limits.max_tree + 1, limits.max_len, limits.prefill_chunk)
            counts, steps = sorted({1, most}), list[tuple[int, Callable[[], object]]]()
            steps += [(count, partial(self.execute, _causal_rows(count, limits))) for count in counts]
            if isinstance(self._target, PluginTarget):
                steps.append((most, partial(self._target.execute, _causal_rows(most, limits), by_prefill=True)))
            for count, execute in steps:
                self._refuse("the engine", fault(self.caches, execute, limits.slots - 1, count, limits.max_len, padded))
        if copied := self._target.session.cache_copies():
            other = "without" if bundle.config.alias else "with"
            remedy = f"; build it {other} --alias, or with --form native" if bundle.config.plugin_form else ""
            print(f"{bundle.path}: the engine copies caches in every step: {copied}{remedy}", file=sys.stderr)


def _causal_rows(count: int, limits: LimitsInfo) -> TargetBatch:
    """The first rows of a sequence in the last slot."""
    words, last = mask_width(limits.max_tree), np.array([limits.slots - 1])
    return TargetBatch.chains(np.zeros((1, count)), last, np.zeros(1), words, np.zeros(1))


def _allocate_layers(config: BundleConfig, target: TargetInfo, dtype: torch.dtype, stream: Stream) -> list[Tensor]:
    """Zeros [slots, kv_heads, rows, head_size]: the layers' k, then their v; rings in layers with a window."""
    rows = [config.cache_rows(layer) for layer in range(target.num_layers)]
    shapes = [(config.limits.slots, target.num_kv_heads, count, target.head_size) for count in rows]
    return [torch.zeros(shape, dtype=dtype, device=stream.device) for shape in 2 * shapes]


def _allocate(
    limits: LimitsInfo,
    heads: TargetInfo | ContextInfo,
    layers: int,
    draft_rows: int,
    dtype: torch.dtype,
    stream: Stream,
) -> Tensor:
    """Zeros [2 * layers, slots, kv_heads, rows, head_size]: the layers' k, then their v."""
    shape = (2 * layers, limits.slots, heads.num_kv_heads, limits.max_len + draft_rows, heads.head_size)
    return torch.zeros(shape, dtype=dtype, device=stream.device)
