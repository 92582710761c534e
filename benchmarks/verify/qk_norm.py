"""What a norm of every query and key head costs: step times of a model with and without it, in turns.

    python -m benchmarks.verify.qk_norm --model artifacts/models/SmolLM2-135M-Instruct

The second model is the first one read as Qwen3, which has Llama's layers with an RMS norm of each query and key head;
the weights of these norms are 1. Both become auto-regressive bundles, in --engines unless they are there. The engines
take turns step by step, in alternating order, so that a busy moment slows both. Exits with 1 where the median step of
some number of rows costs more than --most allows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.figures.intervals import median_ratio
from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from model_defs.files import read_json, read_tensors, save_tensors, weight_files
from redraft.batch import TargetBatch
from redraft.bundle.manifest import Bundle
from redraft.console.progress import tracked
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import mask_width
from redraft.engines import load_engine
from redraft.errors import BundleError
from redraft.request import SamplingConfig

ENSURE = Path(__file__).parents[2] / "build" / "ensure_bundle.py"
console = Console()


def write_with_norms(model: Path, output: Path) -> None:
    """A copy of a Llama's folder with a norm of weight 1 on each query and key head, as Qwen3. Raises ValueError for
    another family, OSError."""
    raw = read_json(model / "config.json")
    if raw.get("model_type") != "llama":
        raise ValueError(f"--model {model} is a {raw.get('model_type')!r}: expected a llama, which has no such norms")
    size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(model):
        weights |= read_tensors(file)
    for layer in range(raw["num_hidden_layers"]):
        for part in "qk":
            weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = torch.ones(size, dtype=torch.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, output)
    save_tensors(weights, output / "model.safetensors")
    changed = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": size}
    (output / "config.json").write_text(json.dumps(raw | changed, indent=2) + "\n")


def build(model: Path, folder: Path, precision: str) -> None:
    """An auto-regressive bundle of a model, unless it is there. Raises RuntimeError."""
    command = [sys.executable, str(ENSURE), "--model", str(model), "--precision", precision, "--no-drafter"]
    if subprocess.run([*command, "--output", str(folder)]).returncode:
        raise RuntimeError(f"the bundle {folder} could not be built, see above")


def paired(bundles: Sequence[Path], rows: Sequence[int], context: int, rounds: int,
           threads: int | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """For each number of rows over `context` cached tokens: median milliseconds of a step of each of two bundles, the
    median of the second's over the first's, step by step, and its 95% interval. Of the rounds, half have the first
    bundle loaded first and half the second, since the order makes a difference of its own. Raises BundleError."""
    loaded = [Bundle.load(path) for path in bundles]
    greedy, words = Sampler(SamplingConfig(), []), mask_width(loaded[0].config.limits.max_tree)
    samples: dict[int, list[list[float]]] = {count: [[], []] for count in rows}
    for order in ((0, 1), (1, 0)):
        engines = {side: load_engine(loaded[side], threads) for side in order}
        for turn in tracked(range(-(-rounds // 2)), "measuring", "rounds", console):
            for count, sides in samples.items():
                batch = TargetBatch.causal(1, count, context, words)
                for engine in engines.values():  # an engine's first step of another number of rows costs more
                    engine.execute(batch, [greedy])
                for side in (0, 1) if turn % 2 else (1, 0):
                    started = time.perf_counter()
                    engines[side].execute(batch, [greedy])
                    sides[side].append(1e3 * (time.perf_counter() - started))
        for engine in engines.values():
            engine.close()
    results = list[dict[str, Any]]()
    for count, sides in samples.items():
        without, with_norms = np.array(sides)
        medians = [float(np.median(side)) for side in (without, with_norms)]
        results.append({"rows": count, "ms": medians, **median_ratio(with_norms, without)})
    return results


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A row per number of rows."""
    shown = Table("A step with q/k norms over one without", ["rows", "without, ms", "with, ms", "with over without"])
    for row in results:
        low, high = row["interval"]
        times = (f"{value:.2f}" for value in row["ms"])
        shown.rows.append([str(row["rows"]), *times, f"{row['ratio'] - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"])
    return shown


def main(argv: list[str] | None = None) -> int:
    """Write the second model, build both bundles, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=Path("artifacts/models/SmolLM2-135M-Instruct"), help="a Llama's folder")
    add("--engines", type=Path, default=Path("artifacts/engines"), help="folder of the bundles and the second model")
    add("--precision", default="bf16", choices=("fp32", "bf16", "int8"))
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--context", type=int, default=256, help="cached tokens before the rows")
    add("--rounds", type=int, default=200, help="steps of each kind by each engine")
    add("--threads", type=int)
    add("--most", type=float, default=0.03, help="largest share that the norms may add to a step")
    add("--output", type=Path, default=Path("artifacts/reports/qk_norm.json"))
    args = parser.parse_args(argv)
    name = f"{args.model.name}-qk-norm"
    folders = [args.engines / f"{each}-ar-{args.precision}" for each in (args.model.name, name)]
    try:
        write_with_norms(args.model, args.engines / name)
        for model, folder in zip((args.model, args.engines / name), folders, strict=True):
            build(model, folder, args.precision)
        results = paired(folders, args.rows, args.context, args.rounds, args.threads)
    except (BundleError, OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    table(results).show(console)
    write_json(args.output, {"precision": args.precision, "context": args.context, "steps": results})
    console.print(f"written to {args.output}")
    return int(max(row["ratio"] for row in results) > 1 + args.most)


if __name__ == "__main__":
    sys.exit(main())
