"""What a step and a draft of a Llama-shaped target take on this GPU, with random weights.

    python -m benchmarks.gpu.llama_7b

Step times against rows and batch (the greedy choice made on the device), and drafting times of a ReDrafter for such a
target (beam width 6, length 5), of Lyanna's drafter (its paper's 3 steps, 4 wide, and the 4 steps with which ours was
measured) and of an EAGLE-3 drafter as the hub's pairs have it (5 levels, 4 wide, a head of 32,000 tokens). The
programs are those of a bundle. With --kernels a replay's time is shared out to its kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.command import Repeats, console, run
from benchmarks.gpu import profile
from benchmarks.gpu.machine import Device, Output, device_of, milliseconds, write_report
from redraft.batch import TargetBatch
from redraft.bundle.backends import Precision
from redraft.compiler.writers.torch import rewritten
from redraft.engines.cuda.graphs import CudaGraphCache, Inputs, available_graphs
from redraft.engines.cuda.transfer import Results
from redraft.loadtest.tables import Table
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.eagle3 import Eagle3Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.export.programs import export_drafter_torch, export_target_torch
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig

LLAMA_2_7B = TargetConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_size=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position=4096,
    tie_embeddings=False,
    qkv_bias=False,
    eos_token_ids=(2,),
)
LLAMA_3_1_8B = replace(
    LLAMA_2_7B, vocab_size=128256, intermediate_size=14336, num_kv_heads=8, max_position=131072,
    rope=RopeConfig(theta=500000.0, type="llama3", factor=8.0),
)  # fmt: skip
TINY = replace(
    LLAMA_2_7B, vocab_size=111, hidden_size=128, intermediate_size=160, num_layers=6, num_heads=2, num_kv_heads=2,
    head_size=64,
)  # fmt: skip
SMOLLM2_135M = replace(
    LLAMA_2_7B, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_size=64, max_position=8192, rope=RopeConfig(theta=100000.0), tie_embeddings=True,
)  # fmt: skip
SHAPES = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "smollm2-135m": SMOLLM2_135M,
    "tiny": TINY,
}
ShapeName = Literal["llama-2-7b", "llama-3.1-8b", "smollm2-135m", "tiny"]
Shape = Annotated[ShapeName, typer.Option(help="Sizes of the target.")]
Context = Annotated[int, typer.Option(help="Cached tokens of each sequence.")]
Batches = Annotated[list[int], typer.Option(help="Sequences at once.")]
InPrecision = Annotated[
    Precision, typer.Option("--precision", help="What matrices are stored and multiplied in: bf16 or fp8.")
]
Rows = Annotated[list[int], typer.Option(help="Rows of each sequence.")]
IN_BF16 = (Precision.bf16, Precision.fp8)
"""Precisions whose programs compute in bf16."""

SYSTEMS = {"redrafter": (6, 5, 6), "lyanna, 3 x 4": (4, 3, 8), "lyanna": (4, 4, 8), "eagle3": (4, 5, 8)}
"""Beam width and length, and children of an expanded node."""
EAGLE3_HEAD = 32000
"""Tokens that the head of a published EAGLE-3 drafter can draft."""
PAIRS = 3
"""What a drafter with a context ingests before a draft: the tokens of a step."""


def require_bf16(precision: Precision) -> None:
    """Raises typer.BadParameter for a precision that computes in something else."""
    if precision not in IN_BF16:
        raise typer.BadParameter(f"--precision {precision}: expected {' or '.join(IN_BF16)}")


def random_target(config: TargetConfig, device: torch.device) -> Target:
    """bf16, on the device from the start."""
    with torch.device("meta"):
        target = Target(config).to(torch.bfloat16)
    target = target.to_empty(device=device).eval().requires_grad_(False)
    for weight in target.parameters():
        weight.normal_(0, 0.02) if weight.ndim == 2 else weight.fill_(1)
    return target


def random_drafter(drafter: Drafter, device: torch.device, cache_rows: int, levels: int) -> Drafter:
    """The same in bf16 on the device, ready to draft; the rope table stays float32, as the kernels take it."""
    drafter = drafter.to(device, torch.float32).eval().requires_grad_(False)
    drafter.prepare(cache_rows, levels)
    ropes = copy.deepcopy(cast(CacheTables, drafter.tables).ropes) if drafter.reads_context else None
    drafter = drafter.to(torch.bfloat16)
    if ropes is not None:
        cast(CacheTables, drafter.tables).ropes = ropes
    return drafter


def graphs(
    function: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    device: torch.device,
    captured: bool = True,
    **options: Any,
) -> Callable[[Inputs], list[np.ndarray]]:
    """Calls of a function, each of which waits for its results: by CUDA graphs, or not `captured`."""
    calls, results = CudaGraphCache(function, device, available_graphs(device), **options), Results(device)
    return lambda inputs: results.fetch(calls(inputs, {}) if captured else calls.eager(inputs))


class TargetSteps:
    """Steps of a target over `context` cached tokens a sequence, each with the greedy choice made on the device."""

    def __init__(self, target: Target, context: int, slots: int, most_rows: int, precision: Precision):
        """`slots` sequences with `most_rows` rows each at most."""
        config, self.device = target.config, target.embedding.weight.device
        self._vocab_size, self._context, self._shape = config.vocab_size, context, CacheShape(slots, context, most_rows)
        with self.device:
            program = export_target_torch(target, self._shape, rewrite=partial(rewritten, precision))
        self._module = program.module()
        size = (slots, config.num_kv_heads, self._shape.rows, config.head_size)
        self._caches = [
            [torch.zeros(size, dtype=torch.bfloat16, device=self.device) for _ in range(config.num_layers)]
            for _ in "kv"
        ]

    def _step(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        input_ids, *others, logit_rows = inputs.values()
        logits, _ = self._module(input_ids, others, logit_rows, *self._caches)
        return [logits.argmax(-1).int()]

    def call(self, batch: int, rows: int, captured: bool = True) -> Callable[[], list[np.ndarray]]:
        """A step of `batch` sequences with `rows` rows each, which waits for its choices; on a GPU a CUDA graph, unless
        not `captured`."""
        inputs = vars(TargetBatch.causal(batch, rows, self._context, self._shape.mask_words))
        inputs["input_ids"] = inputs["input_ids"] % self._vocab_size
        return partial(graphs(self._step, self.device, captured), inputs)


def timed(call: Callable[[], object], device: torch.device, repeats: int, title: str, kernels: bool) -> dict[str, Any]:
    """Milliseconds of a call that waits for its results; with `kernels` also where they go, which is shown."""
    result: dict[str, Any] = {"milliseconds": milliseconds(call, repeats)}
    if kernels:
        result["kernels"] = profile.kernels_of(call, device.type == "cuda")
        profile.table(title, result["milliseconds"], result["kernels"]).show(console)
    return result


def time_target(
    steps: TargetSteps, batches: list[int], rows: list[int], repeats: int, eager: bool = False, kernels: bool = False
) -> list[dict[str, Any]]:
    """What a step of every batch and number of rows takes; `eager`: also without a CUDA graph."""
    result = []
    for batch in batches:
        for count in rows:
            entry: dict[str, Any] = {"batch": batch, "rows": count}
            entry |= timed(steps.call(batch, count), steps.device, repeats, f"{batch} x {count} rows", kernels)
            if eager:
                entry["eager_milliseconds"] = milliseconds(steps.call(batch, count, captured=False), repeats)
            result.append(entry)
    return result


def time_drafting(
    drafter: Drafter,
    shape: tuple[int, int, int],
    context: int,
    batches: list[int],
    repeats: int,
    precision: Precision,
    kernels: bool = False,
) -> list[dict[str, Any]]:
    """What a draft of every batch takes."""
    loop, device = BeamSearch(drafter, *shape), drafter.embedding.device
    with device:
        program = export_drafter_torch(loop, partial(rewritten, precision)).module()
    caches: list[Tensor] = []
    if drafter.reads_context:
        tables = cast(CacheTables, drafter.tables)
        size = (max(batches) + 1, tables.config.num_kv_heads, tables.rows, tables.config.head_size)
        caches = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2 * drafter.context_layers)]

    def draft(inputs: dict[str, Tensor]) -> list[Tensor]:
        features, *others = inputs.values()
        return program([features.to(torch.bfloat16), *others, *caches])[:3]

    result = []
    for batch in batches:
        pairs = batch * (PAIRS if drafter.reads_context else 1)
        inputs: dict[str, np.ndarray | Tensor] = {
            "features": torch.randn(pairs, drafter.feature_size, device=device),
            "tokens": np.arange(pairs, dtype=np.int32) % drafter.config.vocab_size,
        }
        if drafter.reads_context:
            inputs |= {
                "row_offsets": np.arange(0, pairs + 1, PAIRS, dtype=np.int32),
                "slots": np.arange(batch, dtype=np.int32),
                "cache_lengths": np.full(batch, context, np.int32),
            }
        calls = graphs(draft, device, padding={"slots": max(batches)}, idle={"row_offsets": np.array([0, 1], np.int32)})
        title = f"a draft of {type(drafter).__name__}, batch {batch}"
        result.append({"batch": batch, **timed(partial(calls, inputs), device, repeats, title, kernels)})
    return result


def tables(report: dict[str, Any]) -> list[Table]:
    """Step times by rows, and drafting times by system."""
    batches = list(dict.fromkeys(str(step["batch"]) for step in report["steps"]))
    steps = Table(f"{report['shape']}: milliseconds of a step, by rows and batch", ["rows", *batches])
    for rows in dict.fromkeys(step["rows"] for step in report["steps"]):
        cells = [step["milliseconds"] for step in report["steps"] if step["rows"] == rows]
        steps.rows.append([str(rows), *(f"{cell:.2f}" for cell in cells)])
    drafts = Table("Milliseconds of a draft, by batch", ["", *batches])
    for name, system in report["systems"].items():
        drafts.rows.append([name, *(f"{entry['milliseconds']:.2f}" for entry in system["drafting"])])
    return [steps, drafts] if report["systems"] else [steps]


def drafter_of(system: str, target: Target) -> Drafter:
    """A system's drafter for a target."""
    config = target.config
    if system == "redrafter":
        size, vocabulary = config.hidden_size, config.vocab_size
        recurrent = RecurrentConfig(size, vocabulary, exit_dim=2 * size, num_blocks=2, head="own")
        return RecurrentDrafter(recurrent, target)
    if system == "eagle3":
        return Eagle3Drafter(Eagle3Drafter.configure(target, min(EAGLE3_HEAD, config.vocab_size)), target)
    return HiddenStateDrafter(HiddenStateDrafter.configure(target), target)


@torch.inference_mode()
def main(
    device: Device = "cuda",
    shape: Shape = "llama-2-7b",
    context: Context = 512,
    batches: Batches = [1, 2, 4, 8, 16, 32, 64],
    rows: Rows = [1, 2, 4, 8, 16, 32, 64],
    precision: InPrecision = Precision.bf16,
    systems: Annotated[list[str], typer.Option(help="Drafters to time; -: none.")] = list(SYSTEMS),
    eager: Annotated[bool, typer.Option("--eager", help="Time steps without CUDA graphs too.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Share times out to kernels.")] = False,
    repeats: Repeats = 30,
    output: Output = None,
) -> None:
    if unknown := {*systems} - {*SYSTEMS, "-"}:
        raise typer.BadParameter(f"--systems {' '.join(unknown)}: expected some of {', '.join(SYSTEMS)}, or -")
    require_bf16(precision)
    on_device = device_of(device, output, kernels=True)
    torch.manual_seed(0)
    target = random_target(SHAPES[shape], on_device)
    rows = sorted({1, *rows})
    steps = TargetSteps(target, context, max(batches), max(rows), precision)
    report: dict[str, Any] = {"shape": shape, "precision": precision.value, "context": context, "systems": {}}
    report["steps"] = time_target(steps, batches, rows, repeats, eager, kernels)
    for name in () if systems == ["-"] else systems:
        width, length, _ = sizes = SYSTEMS[name]
        drafter = random_drafter(drafter_of(name, target), on_device, context + PAIRS + width * length, length)
        report["systems"][name] = {
            "parameters": sum(weight.numel() for weight in drafter.parameters()),
            "drafting": time_drafting(drafter, sizes, context, batches, repeats, precision, kernels),
        }
    for table in tables(report):
        table.show(console)
    write_report(output, __file__, on_device, report)


if __name__ == "__main__":
    run(main)
