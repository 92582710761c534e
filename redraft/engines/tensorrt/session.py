"""A deserialized TensorRT engine on torch tensors: contexts, buffers, aliases and CUDA graphs."""

from __future__ import annotations

import math
import mmap
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.engines.cache_check import copies
from redraft.engines.cuda.transfer import Pinned
from redraft.engines.tensorrt.library import Messages, TensorRTLibrary
from redraft.engines.tensorrt.profiles import Bucket, Buckets, Shapes, profile_ranges, shape_of
from redraft.errors import BundleError

UPDATED = ".updated"
"""The suffix of the output that is the same memory as a cache."""
ABOUT_NCCL = (
    "; its ranks sum over NCCL, by the libnccl.so.2 that torch has loaded, if this TensorRT finds it and takes its "
    "version: name its folder in LD_LIBRARY_PATH, or build the bundle with --tp 1"
)
PROGRESS_S = 10.0
"""Seconds between two lines of progress while loading."""
DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


class Stream:
    """The CUDA stream that all of a bundle's networks execute on, one after the other; on the CPU, for tests,
    nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.cuda = torch.cuda.Stream(device) if self.on_gpu else None

    @property
    def handle(self) -> int:
        return self.cuda.cuda_stream if self.cuda else 0

    @contextmanager
    def current(self) -> Iterator[None]:
        """Send torch's kernels and copies to this stream too: after all that the caller's stream was given before, and
        before all that it will be given."""
        if self.cuda is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self.cuda.wait_stream(outside)
        with torch.cuda.stream(self.cuda):
            yield
        outside.wait_stream(self.cuda)

    def synchronize(self) -> None:
        if self.cuda:
            self.cuda.synchronize()


class HostBuffers:
    """Pinned staging buffers of a step's inputs, one for each input."""

    def __init__(self, stream: Stream):
        self._pinned = Pinned(stream.on_gpu)

    def send(self, array: np.ndarray, to: Tensor, name: str) -> None:
        """Enqueue a copy of an array to the first places of a tensor; the others get zeros."""
        kept = self._pinned.like(to, name)
        kept[: len(array)] = torch.from_numpy(array)
        kept[len(array) :] = 0
        to.copy_(kept, non_blocking=True)


def named_caches(caches: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    """A network's caches by the names of its inputs, from the layers' k, then their v."""
    layers = len(caches) // 2
    return {f"{kind}_cache.{i}": caches[index * layers + i] for index, kind in enumerate("kv") for i in range(layers)}


class Step:
    """A context with the device buffers of one bucket: `inputs` to fill, `outputs` to read. It executes from a CUDA
    graph once it is captured."""

    def __init__(
        self,
        context: Any,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        stream: Stream,
        library: TensorRTLibrary,
        messages: Messages,
    ):
        self.inputs, self.outputs = inputs, outputs
        self._context, self._stream, self._library, self._messages = context, stream, library, messages
        self._graph: torch.cuda.CUDAGraph | None = None

    def execute(self) -> None:
        """Enqueue. Raises torch.OutOfMemoryError, and RuntimeError where the library refuses for another reason."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._enqueue()

    def capture(self) -> None:
        """Execute once on what is in the buffers, so that kernels are compiled and loaded, then capture the CUDA graph
        where the library allows one. Raises as `execute`."""
        self._enqueue()
        if not self._capturable():
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream.cuda, capture_error_mode="thread_local"):
            self._enqueue()
        self._graph = graph

    def _capturable(self) -> bool:
        """Whether the step can be captured: always with full TensorRT, TensorRT for RTX says."""
        return self._library.builds_on_gpu or self._context.is_stream_capturable(self._stream.handle)

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream.handle):
            self._messages.require_memory()
            raise RuntimeError(f"TensorRT could not enqueue a step: {self._messages.text}")


class Session:
    """One deserialized engine. Caches are the caller's tensors, inputs and outputs at once."""

    def __init__(
        self,
        library: TensorRTLibrary,
        path: Path,
        buckets: Buckets,
        shapes: Shapes,
        caches: Mapping[str, Tensor],
        stream: Stream,
        communicator: Any = None,
    ):
        """`communicator` joins the ranks of an engine that sums over several: see
        `redraft.plugins.operators.all_reduce.nccl`. All make their contexts in the same order, as each waits for the
        others'.

        Raises torch.OutOfMemoryError, and BundleError where the library cannot load the engine for another reason or
        it has other profiles than `buckets`."""
        trt, self._library = library.module(), library
        self._messages = Messages(trt, warnings=True)
        self._runtime = self._messages.given_to(trt.Runtime)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as engine:
            self._engine = self._runtime.deserialize_cuda_engine(engine)  # read as needed: it can have many gigabytes
        if self._engine is None:
            self._messages.require_memory()
            about = "" if communicator is None else ABOUT_NCCL
            raise BundleError(
                f"{library.title} cannot load {path}: {self._messages.text}; rebuild the bundle here{about}"
            )
        expected = len(buckets.profiles)
        if self._engine.num_optimization_profiles != expected:
            raise BundleError(
                f"{path} has {self._engine.num_optimization_profiles} profiles, expected {expected}: rebuild the bundle"
            )
        self._trt, self._buckets, self._shapes, self._stream, self._path = trt, buckets, shapes, stream, path
        self._caches, self._communicator = dict(caches), communicator
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        is_input = trt.TensorIOMode.INPUT
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == is_input]
        self.outputs = [name for name in names if name not in self.inputs]
        self._require_profiles(path)
        self._steps: dict[int, Step] = {}
        self._prefill: Any = None
        # Contexts never execute at the same time: one scratch memory does for all.
        size = max(self._engine.get_device_memory_size_for_profile_v2(i) for i in range(expected))
        self._scratch = torch.empty(max(size, 1), dtype=torch.uint8, device=stream.device)

    def _require_profiles(self, path: Path) -> None:
        """Raise BundleError where a profile does not reach from the smallest to the largest shapes that steps have."""
        shapes = {name: tuple(self._engine.get_tensor_shape(name)) for name in self.inputs}
        for profile, ranges in enumerate(profile_ranges(shapes, self._buckets, self._shapes)):
            for name, (smallest, _, largest) in ranges.items():
                low, _, high = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, profile))
                if (low, high) != (smallest, largest):
                    raise BundleError(
                        f"{path} takes {name} from {low} to {high} in profile {profile}, expected {smallest} to "
                        f"{largest}: rebuild the bundle"
                    )

    def cache_copies(self) -> str | None:
        """Describe how the engine copies caches in every step: see `cache_check.copies`."""
        if not self._caches or not self._library.builds_on_gpu:
            return None
        return copies(self._trt, self._engine, self._caches, max(x.nbytes for x in self._caches.values()))

    def make_ready(self, idle: Mapping[str, float]) -> None:
        """Make all that executing takes: contexts, compiled kernels and CUDA graphs of all steps, by executing each on
        inputs of zeros and the `idle` ones. Says on stderr how far it is. The caches hold anything afterwards. Raises
        as `Step.execute`."""
        count, said = len(self._buckets.steps), time.monotonic()
        for number in reversed(range(count)):
            step = self.step(number)
            if self._stream.on_gpu:
                for name in idle.keys() & step.inputs.keys():
                    step.inputs[name].fill_(idle[name])
                step.capture()
                self._stream.synchronize()
            if time.monotonic() > said + PROGRESS_S:
                said = time.monotonic()
                print(f"{self._path.name}: {count - number} of {count} steps are ready", file=sys.stderr, flush=True)
        if self._buckets.prefill:
            self._prefill = self._prefill or self._context(len(self._buckets.profiles) - 1, fixed=False)

    def step(self, number: int) -> Step:
        """The context and buffers of one of the engine's steps, made when first asked for. All have their outputs in
        those of the largest, which is made first: they are valid until the next step."""
        largest = len(self._buckets.steps) - 1
        for wanted in (largest, number):
            if wanted not in self._steps:
                bucket, profile = self._buckets.steps[wanted], self._buckets.profile_of(wanted)
                outputs = self._steps[largest].outputs if self._steps else {}
                self._steps[wanted] = self._bind(self._context(profile, fixed=True), bucket, self._caches, outputs)
        return self._steps[number]

    def prefill(self, bucket: Bucket, slot: int | None = None) -> Step:
        """Fresh buffers for the prefill profile. With `slot` it sees only that slot of the caches."""
        caches = self._caches if slot is None else {name: x[slot : slot + 1] for name, x in self._caches.items()}
        if self._prefill is None:
            self._prefill = self._context(len(self._buckets.profiles) - 1, fixed=False)
        return self._bind(self._prefill, bucket, caches, {})

    def _context(self, profile: int, fixed: bool) -> Any:
        """A new context of a profile, of one shape or of many."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(
            strategy if self._library.builds_on_gpu else self._compiling(strategy, fixed)
        )
        if context is None:
            self._messages.require_memory()
            raise RuntimeError(f"TensorRT cannot make a context for profile {profile}: {self._messages.text}")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        if not context.set_optimization_profile_async(profile, self._stream.handle):
            raise RuntimeError(f"TensorRT cannot choose profile {profile}: {self._messages.text}")
        if self._communicator is not None and not context.set_communicator(self._communicator):
            raise BundleError(f"TensorRT cannot take NCCL's communicator: {self._messages.text}{ABOUT_NCCL}")
        return context

    def _compiling(self, strategy: Any, fixed: bool) -> Any:
        """A configuration of TensorRT for RTX. It compiles kernels for a fixed shape before they execute, so that no
        fallback kernels are captured; for others beside that, so that a prompt of a new length does not wait."""
        config, kinds = self._engine.create_runtime_config(), self._trt.DynamicShapesKernelSpecializationStrategy
        config.set_execution_context_allocation_strategy(strategy)
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if fixed else kinds.LAZY
        return config

    def _bind(self, context: Any, bucket: Bucket, caches: Mapping[str, Tensor], within: Mapping[str, Tensor]) -> Step:
        """A context with buffers of a bucket; outputs lie in those of `within` unless it is empty."""
        leading = self._shapes(bucket)
        inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()
        for name in self.inputs:
            shape = shape_of(name, tuple(self._engine.get_tensor_shape(name)), leading, bucket)
            if name in caches:
                inputs[name] = caches[name][: shape[0]]
            else:
                inputs[name] = torch.zeros(shape, dtype=self._dtype(name), device=self._stream.device)
            if not context.set_input_shape(name, shape):
                raise ValueError(f"{name} has shape {shape}, which is beyond the shapes that the engine was built for")
        for name in self.outputs:
            aliased = inputs.get(name.removesuffix(UPDATED)) if name.endswith(UPDATED) else None
            if aliased is None:
                shape = tuple(context.get_tensor_shape(name))
                if within:
                    aliased = within[name].flatten()[: math.prod(shape)].view(shape)
                else:
                    aliased = torch.zeros(shape, dtype=self._dtype(name), device=self._stream.device)
            outputs[name] = aliased
        for name, tensor in (*inputs.items(), *outputs.items()):
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise RuntimeError(f"TensorRT does not take the address of {name}: {self._messages.text}")
        return Step(context, inputs, outputs, self._stream, self._library, self._messages)

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._engine.get_tensor_dtype(name).name]
