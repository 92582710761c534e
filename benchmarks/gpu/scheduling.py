"""Throughput of the scheduler over a target with random weights: tokens/s, and what the host takes of each step.

    python -m benchmarks.gpu.scheduling

The engine is the torch backend's, with the programs of a bundle: nothing is read from or written to disk.
Each number of streams is run greedily and with top-p, auto-regressively and with trees of a random recurrent drafter.
Such trees are hardly ever accepted, so their rows show what a step costs and not a speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.command import Concurrency, console, run
from benchmarks.gpu.llama_7b import SHAPES, InPrecision, Shape, random_drafter, random_target, require_bf16
from benchmarks.gpu.machine import PACKAGES, Device, Output, device_of, write_report
from redraft.bundle.backends import Precision
from redraft.loadtest.tables import Table
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.export.programs import export_drafter_torch, export_target_torch
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.target.config import TargetConfig

if TYPE_CHECKING:
    from redraft.llm import LLM

SETTINGS: dict[str, dict[str, float]] = {"greedy": {}, "top-p": {"temperature": 0.8, "top_p": 0.95}}
BEAMS = (4, 4, 8)
"""Beam width and length of the random drafter, and children of an expanded node."""
HOT_VOCABULARY = 32768
TREES = "trees"
WARM_UP = 16
"""Tokens of each stream before a measurement."""


@torch.inference_mode()
def random_llm(
    config: TargetConfig,
    device: torch.device,
    streams: int,
    max_len: int,
    nodes: int,
    precision: Precision,
    eager_prompts: bool = False,
) -> LLM:
    """An LLM on a random target and drafter, for `streams` sequences of `max_len` tokens and trees of
    `nodes` drafted nodes. With `eager_prompts` steps of more rows than all trees have run without a CUDA graph. Raises
    BundleError where they do not fit the device."""
    from redraft.bundle.backends import TORCH
    from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo
    from redraft.bundle.manifest import Bundle, Manifest
    from redraft.bundle.method import MethodConfig
    from redraft.compiler.writers.torch import rewritten
    from redraft.engines.cuda.buckets import step_buckets
    from redraft.engines.torch import TorchEngine
    from redraft.llm import LLM
    from redraft.runtime import Runtime
    from redraft.scheduling.scheduler import Limits
    from redraft.text import TextCodec

    target = random_target(config, device)
    shape = TargetInfo.model_fields.keys() & vars(config)
    hot = min(HOT_VOCABULARY, config.vocab_size)
    recurrent = RecurrentConfig(config.hidden_size, config.vocab_size, num_blocks=2, hot_vocabulary=hot)
    loop = BeamSearch(random_drafter(RecurrentDrafter(recurrent, target), device, max_len, BEAMS[1]), *BEAMS)
    limits = LimitsInfo(slots=streams, max_len=max_len, max_tree=nodes + 1, prefill_chunk=min(512, max_len))
    width, length, candidates = BEAMS
    method = MethodConfig(
        drafter=RecurrentDrafter.name,
        construction="best_first",
        beam_width=width,
        beam_length=length,
        candidates=candidates,
        tree_budget=nodes,
        ngram=False,
        verification="sampled_walk",
    )
    bundle = Bundle(
        Path("random"),
        BundleConfig(
            name="random",
            backend=TORCH,
            precision=precision,
            target=TargetInfo(feature_size=target.feature_size, **{name: getattr(config, name) for name in shape}),
            limits=limits,
            methods={TREES: method},
            tensor_parallel=1,
        ),
        Manifest(
            files={},
            versions={"torch": torch.__version__},
            cpu_features=[],
            target_fingerprint="random",
            command="python -m benchmarks.gpu.scheduling",
        ),
    )
    cache = CacheShape(limits.slots, limits.max_len, limits.max_tree)
    rewrite = partial(rewritten, precision)
    with device:
        exported = {
            "target.pt2": export_target_torch(target, cache, rewrite=rewrite),
            f"drafter.{TREES}.pt2": export_drafter_torch(loop, rewrite),
        }
    programs = {name: program.module() for name, program in exported.items()}
    buckets = [
        bucket
        for bucket in step_buckets(limits)
        if not eager_prompts or bucket.rows <= bucket.sequences * limits.max_tree
    ]
    with (
        patch("redraft.engines.torch.load_program", lambda path, device: programs[path.name]),
        patch("redraft.engines.torch.step_buckets", lambda _: buckets),
    ):
        engine = TorchEngine(bundle)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    runtime = Runtime(
        engine,
        TextCodec(words),
        Limits(**limits.model_dump()),
        config.vocab_size,
        methods=bundle.config.methods,
        prefix_reuse=False,
    )
    return LLM(runtime)


def serve(
    llm: LLM, streams: int, prompt: int, tokens: int, method: str, sampling: dict[str, float]
) -> dict[str, float]:
    """Throughput of `streams` requests at a time, each of `tokens` tokens after `prompt` random ones, and a step's
    milliseconds in the target, in the drafter and on the host."""
    from benchmarks.speed.inprocess import timed
    from redraft.request import GenerateRequest, SamplingConfig

    ids = np.random.default_rng(0).integers(llm.runtime.vocab_size, size=(streams, prompt)).tolist()

    def requests(count: int) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                id="r",
                input_ids=ids[i],
                max_tokens=count,
                end_id=-1,
                method=method,
                sampling=SamplingConfig(**sampling, seed=i),  # type: ignore[arg-type]
            )
            for i in range(streams)
        ]

    llm.runtime.with_methods(llm.runtime.methods)
    llm.run(requests(min(WARM_UP, tokens)), streams)
    answers, spent = timed(llm, requests(tokens), streams)
    host = spent.step_s - spent.target_s - spent.draft_s
    times = {"step": spent.step_s, "target": spent.target_s, "draft": spent.draft_s, "host": host}
    steps = sum(answer.stats.steps for answer in answers)
    return {
        "tokens_per_s": sum(answer.stats.output_tokens for answer in answers) / spent.wall_s,
        "acceptance_length": 1 + sum(answer.stats.accepted for answer in answers) / max(steps, 1),
        "steps": spent.steps,
        **{f"{name}_ms": 1e3 * taken / spent.steps for name, taken in times.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each measurement."""
    result = Table(
        "The scheduler over a random target (milliseconds of a step)",
        ["streams", "sampling", "method", "tokens/s", "tokens/step", "step", "target", "draft", "host"],
    )
    for row in rows:
        times = [f"{row[f'{name}_ms']:.2f}" for name in ("step", "target", "draft", "host")]
        throughput = [f"{row['tokens_per_s']:.0f}", f"{row['acceptance_length']:.2f}"]
        result.rows.append([str(row["streams"]), row["sampling"], row["method"], *throughput, *times])
    return result


def main(
    device: Device = "cuda",
    shape: Shape = "llama-3.1-8b",
    streams: Concurrency = [1, 8, 32],
    prompt: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each answer.")] = 128,
    nodes: Annotated[int, typer.Option("--tree-budget", help="Drafted nodes of a tree.")] = 15,
    precision: InPrecision = Precision.bf16,
    eager_prompts: Annotated[
        bool, typer.Option("--eager-prompts", help="No CUDA graphs for steps with a long prompt.")
    ] = False,
    output: Output = None,
) -> None:
    require_bf16(precision)
    on_device = device_of(device, output, PACKAGES, kernels=True)
    from redraft.request import AUTO_REGRESSIVE

    torch.manual_seed(0)
    llm = random_llm(SHAPES[shape], on_device, max(streams), prompt + tokens, nodes, precision, eager_prompts)
    rows: list[dict[str, Any]] = []
    for count in streams:
        for method in (AUTO_REGRESSIVE, TREES):
            for name, sampling in SETTINGS.items():
                figures = serve(llm, count, prompt, tokens, method, sampling)
                rows.append({"streams": count, "method": method, "sampling": name, **figures})
                console.print(f"{rows[-1]}", markup=False)
    table(rows).show(console)
    setting = {
        "shape": shape,
        "precision": precision.value,
        "prompt": prompt,
        "tokens": tokens,
        "nodes": nodes,
        "eager_prompts": eager_prompts,
    }
    memory = {"peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {}
    write_report(output, __file__, on_device, {**setting, "rows": rows, **memory})


if __name__ == "__main__":
    run(main)
