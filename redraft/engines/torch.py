"""The `torch` backend: exported programs, on CUDA (not run) where there is a device, else on the CPU, as the reference
in tests.

Rows and sequences are padded to a few numbers, so that each shape is prepared once: on a GPU as a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

import plugins.all_reduce.torch_op
import plugins.tree_attention.torch_op  # noqa: F401 (both register operators that the programs call)
from plugins.cuda.compile import ptx
from plugins.library import BuildError
from plugins.tree_attention.tensorrt_plugin import FP32_KERNELS, HEAD_SIZES, KERNELS
from redraft.bundle import Bundle, BundleConfig, BundleError, MethodInfo, target_folder
from redraft.engines import gpu, memory
from redraft.engines.choice import choose
from redraft.engines.fixed_calls import FixedCalls, GraphPool, padded_size
from redraft.engines.interface import (
    DraftBatch,
    DraftCandidates,
    DraftDraws,
    DraftSampling,
    Gather,
    LogitRows,
    Samplers,
    TargetBatch,
    alone,
)
from redraft.engines.rows import ChainBuffers, PairBuffers, RowBuffers, SamplingBuffers
from redraft.engines.transfer import Results

CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS, NEXT = ("hidden", "tokens"), "row_offsets"
CONTEXT = (NEXT, "slots", "cache_lengths")

Program = Callable[..., Sequence[Tensor]]


class TorchEngine:
    """A bundle's programs, and caches in the bundle's precision. Of several ranks, one's: see `OpenVINOEngine`."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rank: int = 0, gather: Gather = alone):
        """Says on stderr which device executes. Raises BundleError where the GPU's kernels do not fit the bundle, or
        its memory does not suffice."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.gather = gather
        device, free = available_device(), 0
        if device.type == "cuda":
            require_kernels(bundle, device)
            free = gpu.free_bytes(device)
        print(f"{bundle.path} executes on {gpu.describe(device)}", file=sys.stderr)
        self._within_memory = partial(memory.within, bundle, rank, ".pt2", free)
        with self._within_memory():
            self._load(bundle, rank, device)

    def _load(self, bundle: Bundle, rank: int, device: torch.device) -> None:
        config = bundle.config
        target, limits = config.target, config.limits
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        folder = target_folder(bundle.path, rank, config.tensor_parallel)
        program = load_program(folder / "target.pt2", device)
        self._rows = RowBuffers(limits, target.vocab_size)
        heads, rows = (config.kv_heads(rank), target.head_size), (limits.slots, limits.max_tree)
        self.caches = [_allocate(config, *heads, target.num_layers, *rows, device) for _ in "kv"]
        self.steps = FixedCalls(
            lambda inputs: self._forward(program, inputs), device, pool, tries_again=config.tensor_parallel == 1
        )
        self._results = Results(device)
        methods = {name: method for name, method in config.methods.items() if method.drafter and rank == 0}
        self.drafters = {
            name: TorchDrafter(bundle, name, method, device, self._within_memory, pool)
            for name, method in methods.items()
        }

    def _forward(self, program: Program, inputs: dict[str, Tensor]) -> list[Tensor]:
        input_ids, *rows, logit_rows = inputs.values()
        return [output.float() for output in program(input_ids, rows, logit_rows, *self.caches)]

    @torch.inference_mode()
    def execute(self, batch: TargetBatch, samplers: Samplers = None) -> tuple[LogitRows, Tensor | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits, BundleError where a GPU's
        memory does not suffice for it."""
        inputs, most = self._rows.fill(batch), self._rows.most_rows
        sequences = padded_size(len(batch.slots), len(inputs["slots"]))
        inputs |= {name: inputs[name][:sequences] for name in ("slots", "cache_lengths")}
        inputs |= {name: inputs[name][: sequences + 1] for name in ("row_offsets", "commit_offsets")}
        rows, logit_rows = (padded_size(len(inputs[name]), most) for name in ("input_ids", "logit_rows"))
        padded = dict.fromkeys(("input_ids", "positions", "tree_mask"), rows)
        with self._within_memory():
            outputs = self.steps(inputs, padded | {"logit_rows": logit_rows})
            hidden = outputs[1][: len(batch.input_ids)] if len(outputs) > 1 else None
            logits = self.gather(outputs[0][: len(batch.logit_rows)])
            return choose(logits, batch, samplers, self._results), hidden

    def close(self) -> None:
        """Free the programs and the caches."""
        del self.steps
        self.caches, self.drafters = [], {}


class TorchDrafter:
    """The drafter of one method: its program, and its context cache if it reads one."""

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        method: MethodInfo,
        device: torch.device,
        within_memory: Callable[[], AbstractContextManager[None]],
        pool: GraphPool | None = None,
    ):
        """`within_memory` says what would fit where a call runs out of memory."""
        config, context = bundle.config, method.context
        self._slots, self._within_memory = config.limits.slots, within_memory
        self.reads_context = context is not None
        self.reads_text = context is not None and context.from_text
        self.caches: list[Tensor] = []
        if context:
            heads = context.num_kv_heads, context.head_size
            # One slot more, where sequences that only fill up a batch draft.
            rows = self._slots + 1, context.draft_rows
            self.caches = _allocate(config, *heads, 2 * context.layers, *rows, device)
        program = load_program(bundle.path / f"drafter.{name}.pt2", device)
        padding, idle = {"slots": self._slots, "top_p": 1.0}, {NEXT: np.array([0, 1], np.int32)}
        self._pairs = PairBuffers(config.limits, config.target, self.reads_context)
        self._sampling = SamplingBuffers.of(method, self._slots)
        self.drafts = FixedCalls(lambda inputs: self._forward(program, inputs), device, pool, padding, idle)
        self._device, self._results = device, Results(device)
        self._chains: ChainBuffers | None = None
        if method.chain_levels:
            again = load_program(bundle.path / f"resampler.{name}.pt2", device)
            self._chains, self._levels = ChainBuffers(self._slots, method.chain_levels), method.chain_levels
            self.resamples = FixedCalls(lambda inputs: again(list(inputs.values())), device, pool)

    def _forward(self, program: Program, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        own = [tensor for name, tensor in inputs.items() if name not in SamplingBuffers.NAMES]
        drawing = [tensor for name, tensor in inputs.items() if name in SamplingBuffers.NAMES]
        return program([*own, *self.caches, *drawing])

    def _run(self, batch: DraftBatch, sampling: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The program's outputs for a batch, padded to more sequences and cut again."""
        self._pairs.check(batch)
        inputs = {name: getattr(batch, name) for name in (*PAIRS, *(CONTEXT if self.reads_context else ()))} | sampling
        count = len(batch.slots)
        sequences = padded_size(count, self._slots)
        pairs = padded_size(len(inputs["tokens"]), self._pairs.most_pairs) if self.reads_context else sequences
        padded = dict.fromkeys(inputs, sequences) | dict.fromkeys(PAIRS, pairs) | {NEXT: sequences + 1}
        with self._within_memory():
            inputs["hidden"] = torch.as_tensor(batch.hidden, device=self._device)
            return self._results.fetch([_first(output, sequences, count) for output in self.drafts(inputs, padded)])

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftCandidates:
        """See `DraftEngine.draft`. Raises RuntimeError where the drafter draws at random, ValueError for a batch that
        does not fit it."""
        if self._sampling is not None:
            raise RuntimeError("this drafter draws at random: it gives no candidates")
        candidates, log_probs, parents, *raw_logits = self._run(batch, {})
        kept = raw_logits[0].reshape(*candidates.shape[:2], -1) if raw_logits else None
        return DraftCandidates(candidates, log_probs, parents, kept)

    @torch.inference_mode()
    def resample(self, chains: list[np.ndarray], roots: np.ndarray) -> DraftCandidates:
        """See `ResamplingEngine.resample`. Raises RuntimeError where the drafter leaves no chains, ValueError for
        chains that do not fit it."""
        if self._chains is None:
            raise RuntimeError("this drafter leaves no chain to draft again from")
        inputs, count = self._chains.fill(chains, roots), len(chains)
        inputs["raw_logits"] = inputs["raw_logits"].reshape(count, self._levels, -1)
        with self._within_memory():
            outputs = self.resamples(inputs, dict.fromkeys(inputs, padded_size(count, self._slots)))
            candidates, log_probs, parents = self._results.fetch([output[:count] for output in outputs])
        for b, chain in enumerate(chains):
            log_probs[b, len(chain) :] = -np.inf
        return DraftCandidates(candidates, log_probs, parents)

    @torch.inference_mode()
    def draw(self, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
        """See `DrawingEngine.draw`. Raises as `draft` does, and where the drafter does not draw at random."""
        if self._sampling is None:
            raise RuntimeError("this drafter does not draw at random")
        return DraftDraws(*self._run(batch, self._sampling.fill(sampling, len(batch.slots))))


def available_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_kernels(bundle: Bundle, device: torch.device) -> None:
    """Raises BundleError where the GPU is too old for the CUDA kernels, or they cannot be compiled, or do not take the
    bundle's heads."""
    gpu.require_capability(device)
    config = bundle.config
    write, *_ = FP32_KERNELS if config.precision == "fp32" else KERNELS
    try:
        ptx(write.source, f"sm_{gpu.capability(device).replace('.', '')}")
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


def _allocate(
    config: BundleConfig, kv_heads: int, head_size: int, count: int, slots: int, draft_rows: int, device: torch.device
) -> list[Tensor]:
    shape = (slots, kv_heads, config.limits.max_len + draft_rows, head_size)
    return [torch.zeros(shape, dtype=CACHE_DTYPES[config.precision], device=device) for _ in range(count)]


def _first(output: Tensor, sequences: int, count: int) -> Tensor:
    """What of an output of `sequences` is the first `count`'s."""
    return output[: len(output) // sequences * count]
