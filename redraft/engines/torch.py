"""The `torch` backend: exported programs, on CUDA where there is a device, else on the CPU, as the reference
in tests.

Steps and drafts are padded to a few buckets: on a GPU CUDA graphs, captured at load. What fits none runs as it is: see
`redraft.engines.cuda.buckets`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

import redraft.plugins.operators.add_norm.torch_op
import redraft.plugins.operators.all_reduce.torch_op
import redraft.plugins.operators.beam_step.torch_op
import redraft.plugins.operators.draft_rows.torch_op
import redraft.plugins.operators.fp8_linear.torch_op
import redraft.plugins.operators.perturbed_topk.torch_op
import redraft.plugins.operators.silu_product.torch_op
import redraft.plugins.operators.top_log_probs.torch_op
import redraft.plugins.operators.tree_attention.torch_op  # noqa: F401 (they register operators that the programs call)
from redraft.batch import DraftBatch, TargetBatch
from redraft.bundle.config import BundleConfig, target_folder
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.engines import memory
from redraft.engines.api import Gather, LogitRows, Meanwhile, Samplers, forbid_unknown, local_logits
from redraft.engines.cache_rows import copy_rows
from redraft.engines.cuda import device as gpu
from redraft.engines.cuda.buckets import Bucket, draft_buckets, fitting, step_buckets
from redraft.engines.cuda.graphs import CudaGraphCache, Graphs, available_graphs
from redraft.engines.cuda.sampling import draws_on, sample
from redraft.engines.cuda.transfer import Results
from redraft.engines.drafter import NetworkDrafter
from redraft.engines.host_buffers import NoiseBuffers, RowBuffers, SamplingBuffers
from redraft.errors import BundleError
from redraft.plugins.cuda.compile import ptx
from redraft.plugins.library import BuildError
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_KERNELS, HEAD_SIZES, KERNELS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What a bundle's caches and activations are in"""
ROWS = ("input_ids", "positions", "tree_mask")
SEQUENCES, BOUNDS = ("slots", "cache_lengths"), ("row_offsets", "commit_offsets")
PAIRS, NEXT = ("features", "tokens"), "row_offsets"
BEHIND_CACHES = {*SamplingBuffers.NAMES, *NoiseBuffers.NAMES}
"""A drafter's inputs that follow its caches."""
CONTEXT = (NEXT, *SEQUENCES)

Program = Callable[..., Sequence[Tensor]]


class TorchEngine:
    """A bundle's programs, and caches in its precision; of several ranks, the engine of one (see `OpenVINOEngine`)."""

    reuse_refusal = None

    def __init__(self, bundle: Bundle, threads: int | None = None, rank: int = 0, gather: Gather = local_logits):
        """Print on stderr which device executes. Raises BundleError for a bundle of another torch, and where the GPU's
        kernels do not fit the bundle or its memory does not suffice."""
        if threads is not None:
            torch.set_num_threads(threads)
        require_version(bundle)
        self.gather = gather
        device, free = available_device(), 0
        self.overlaps = device.type == "cuda"
        if device.type == "cuda":
            require_kernels(bundle, device)
            free = gpu.free_bytes(device)
            memory.require_room(bundle, rank, ".pt2", free)
        print(f"{bundle.path} executes on {gpu.describe(device)}", file=sys.stderr)
        self._within_memory = partial(memory.within, bundle, rank, ".pt2", free)
        with self._within_memory():
            self._load(bundle, rank, device)
        if bundle.config.tensor_parallel == 1:
            self.self_test()

    def _load(self, bundle: Bundle, rank: int, device: torch.device) -> None:
        config = bundle.config
        target, limits = config.target, config.limits
        graphs = available_graphs(device)
        folder = target_folder(bundle.path, rank, config.tensor_parallel)
        program = load_program(folder / "target.pt2", device)
        self._rows, self._unknown_tokens = RowBuffers(limits, target.vocab_size), target.unknown_tokens
        rows = map(config.cache_rows, range(target.num_layers))
        shapes = [(limits.slots, config.kv_heads(rank), count, target.head_size) for count in rows]
        self.caches = [_allocate(config, shapes, device) for _ in "kv"]
        self._buckets = step_buckets(limits)
        self.steps = CudaGraphCache(lambda inputs: self._forward(program, inputs), device, graphs)
        self._results, self._draws = Results(device), draws_on(device)
        methods = {name: method for name, method in config.methods.items() if method.drafter and rank == 0}
        self.drafters = {
            name: TorchDrafter(bundle, name, method, device, self._within_memory, graphs)
            for name, method in methods.items()
        }

    def _forward(self, program: Program, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        input_ids, *rows, logit_rows = inputs.values()
        return program(input_ids, rows, logit_rows, *self.caches)

    @torch.inference_mode()
    def self_test(self) -> None:
        """Capture the graphs of all buckets, on a GPU, each of which executes once before. Of several ranks, all do it
        together, when all are loaded. Raises BundleError where memory does not suffice."""
        with self._within_memory():
            self.steps.prepare(self._rows.fill(no_batch(self._rows.mask_words)), map(step_sizes, self._buckets))
            for drafter in self.drafters.values():
                drafter.prepare()

    @torch.inference_mode()
    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Tensor | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits, BundleError where a
        GPU's memory does not suffice for it."""
        self._rows.check(batch)  # the CUDA kernels clamp what is outside, and say nothing
        inputs, rows = self._rows.fill(batch), len(batch.input_ids)
        bucket = fitting(self._buckets, len(batch.slots), rows, len(batch.logit_rows))
        sequences = bucket.sequences if bucket else len(batch.slots)
        inputs |= {name: inputs[name][:sequences] for name in SEQUENCES}
        inputs |= {name: inputs[name][: sequences + 1] for name in BOUNDS}
        with self._within_memory():
            outputs = self.steps(inputs, step_sizes(bucket)) if bucket else self.steps.eager(inputs)
            features = outputs[1][:rows] if len(outputs) > 1 else None
            logits = forbid_unknown(self.gather(outputs[0][: len(batch.logit_rows)]), self._unknown_tokens)
            return sample(logits, batch, samplers, self._results, self._draws, meanwhile), features

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """See `Engine.step_shapes`: on a GPU those of the captured graphs."""
        return [(bucket.sequences, bucket.rows) for bucket in self._buckets]

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`."""
        for caches in self.caches:
            copy_rows(caches, source, target, rows)
        for drafter in self.drafters.values():
            copy_rows(drafter.caches, source, target, rows + 1)

    def close(self) -> None:
        """Free the programs and the caches, and give a GPU's memory back, so that another bundle can be loaded."""
        del self.steps
        self.caches, self.drafters = [], {}
        gc.collect()  # a drafter and its calls refer to each other
        torch.cuda.empty_cache()


class TorchDrafter(NetworkDrafter):
    """The drafter of one method: its program, and its context cache if it reads one."""

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        method: MethodConfig,
        device: torch.device,
        within_memory: Callable[[], AbstractContextManager[None]],
        graphs: Graphs | None = None,
    ):
        """`within_memory` says what would fit where a call runs out of memory."""
        super().__init__(bundle.config, method)
        config, context = bundle.config, method.context
        self._slots, self._within_memory = config.limits.slots, within_memory
        self.caches: list[Tensor] = []
        if context:
            # One slot more, where sequences that only fill up a batch draft.
            slots, rows = self._slots + 1, config.limits.max_len + context.draft_rows
            shapes = [(slots, context.num_kv_heads, rows, context.head_size)] * (2 * context.layers)
            self.caches = _allocate(config, shapes, device)
        program = load_program(bundle.path / f"drafter.{name}.pt2", device)
        padding, idle = {"slots": self._slots, "top_p": 1.0}, {NEXT: np.array([0, 1], np.int32)}
        self._feature_size = config.target.feature_size
        self._buckets = draft_buckets(config.limits, self.reads_context)
        self.drafts = CudaGraphCache(lambda inputs: self._forward(program, inputs), device, graphs, padding, idle)
        self._dtype = DTYPES[config.precision]
        self._device, self._results = device, Results(device)
        if self._levels:
            again = load_program(bundle.path / f"resampler.{name}.pt2", device)
            self.resamples = CudaGraphCache(lambda inputs: self._again(again, **inputs), device, graphs)

    def prepare(self) -> None:
        """Capture the graphs of all buckets, on a GPU."""
        nothing = DraftBatch.of_roots(np.zeros((1, self._feature_size), np.float32), np.zeros(1, np.int32))
        inputs = self._inputs(nothing, self._sampling.views(1) if self._sampling else self._noise_inputs(None, 1))
        self.drafts.prepare(inputs, [draft_sizes(inputs, bucket) for bucket in self._buckets])
        if self._chains and self.drafts.outputs:
            *_, raw_logits = self.drafts.outputs
            empty = self._chains.fill([np.zeros((0, raw_logits.shape[-1]), np.float32)], np.zeros(1, np.int32))
            chains = self._by_sequence(empty | self._noise_inputs(None, 1))
            self.resamples.prepare(chains, [dict.fromkeys(chains, bucket.sequences) for bucket in self._buckets])

    def _forward(self, program: Program, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        tensors = [tensor for name, tensor in inputs.items() if name not in BEHIND_CACHES]
        drawing = [tensor for name, tensor in inputs.items() if name in BEHIND_CACHES]
        outputs = program([*tensors, *self.caches, *drawing])
        return [output.float() if output.is_floating_point() else output for output in outputs]

    def _again(self, program: Program, raw_logits: Tensor, **others: Tensor) -> Sequence[Tensor]:
        return program([raw_logits.to(self._dtype), *others.values()])

    @torch.inference_mode()
    def _run(self, batch: DraftBatch, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]) -> list[np.ndarray]:
        count = len(batch.slots)
        bucket = fitting(self._buckets, count, len(batch.tokens))
        with self._within_memory():
            tensors = self._inputs(batch, inputs)
            results = self.drafts(tensors, draft_sizes(tensors, bucket)) if bucket else self.drafts.eager(tensors)
            sequences = bucket.sequences if bucket else count
            return self._results.fetch([_first(result, sequences, count) for result in results])

    @torch.inference_mode()
    def _run_resampler(self, inputs: dict[str, np.ndarray], count: int) -> list[np.ndarray]:
        bucket = fitting(self._buckets, count, count)
        assert bucket is not None, "the limits that ChainBuffers enforces"
        tensors = self._by_sequence(inputs)
        with self._within_memory():
            results = self.resamples(tensors, dict.fromkeys(tensors, bucket.sequences))
            return self._results.fetch([result[:count] for result in results])

    def _inputs(self, batch: DraftBatch, sampling: dict[str, np.ndarray]) -> dict[str, np.ndarray | Tensor]:
        features = torch.as_tensor(batch.features, device=self._device).to(self._dtype)
        others = {name: getattr(batch, name) for name in ("tokens", *(CONTEXT if self.reads_context else ()))}
        return {"features": features, **others, **sampling}

    def _by_sequence(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The resampler's inputs, all with a first dimension of sequences."""
        return inputs | {"raw_logits": inputs["raw_logits"].reshape(len(inputs["tokens"]), self._levels, -1)}


def available_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_version(bundle: Bundle) -> None:
    """Raise BundleError where another release of torch than this exported the bundle's programs."""
    built, here = bundle.manifest.versions.get("torch", "unknown"), torch.__version__
    if _release(built) != _release(here):
        raise BundleError(
            f"{bundle.path} was exported by torch {built}, this is {here}, which need not read it; on this machine "
            f"{bundle.manifest.rebuild}"
        )


def _release(version: str) -> list[str]:
    """Major and minor."""
    return version.split(".")[:2]


def step_sizes(bucket: Bucket) -> dict[str, int]:
    """The first dimensions of a target's inputs."""
    rows, sequences = dict.fromkeys(ROWS, bucket.rows), dict.fromkeys(SEQUENCES, bucket.sequences)
    return rows | sequences | dict.fromkeys(BOUNDS, bucket.sequences + 1) | {"logit_rows": bucket.logits}


def draft_sizes(inputs: Iterable[str], bucket: Bucket) -> dict[str, int]:
    """The first dimensions of a drafter's inputs of these names."""
    sizes = dict.fromkeys(inputs, bucket.sequences) | dict.fromkeys(PAIRS, bucket.rows)
    return sizes | {NEXT: bucket.sequences + 1}


def no_batch(mask_words: int) -> TargetBatch:
    """One sequence without rows."""
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    bounds = np.zeros(2, np.int32)
    return TargetBatch(none, none, bounds, zero, zero, np.zeros((0, mask_words), np.int32), none, bounds, none)


def require_kernels(bundle: Bundle, device: torch.device) -> None:
    """Raise BundleError where the GPU is too old for the CUDA kernels or for the bundle's precision, or they cannot be
    compiled, or do not take the bundle's heads."""
    gpu.require_capability(device)
    config = bundle.config
    gpu.require_precision(device, config.precision, "build with --precision bf16")
    write, *_ = FP32_KERNELS if config.precision == "fp32" else KERNELS
    try:
        ptx(write.source, gpu.architecture(device))
    except BuildError as error:
        raise BundleError(f"{bundle.path}: {error}") from None
    contexts = [method.context for method in config.methods.values() if method.context]
    for size in (config.target.head_size, *(context.head_size for context in contexts)):
        if size not in HEAD_SIZES:
            raise BundleError(
                f"{bundle.path}: heads of size {size}, and the CUDA kernels take {HEAD_SIZES}; an empty "
                "CUDA_VISIBLE_DEVICES runs the bundle on the CPU"
            )


def load_program(path: Path, device: torch.device) -> torch.nn.Module:
    """An exported program, its weights and what it makes itself on a device."""
    program = torch.export.load(path)
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    return program.module()


def _allocate(config: BundleConfig, shapes: Iterable[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    return [torch.zeros(shape, dtype=DTYPES[config.precision], device=device) for shape in shapes]


def _first(output: Tensor, sequences: int, count: int) -> Tensor:
    """The part of an output of `sequences` that belongs to the first `count`."""
    return output[: len(output) // sequences * count]
