"""What a step of a mixture of experts costs: step times beside a dense model that computes as many columns, in turns.

    python -m benchmarks.verify.experts --model artifacts/models/SmolLM2-135M-Instruct

The second model is the first one read as Qwen3-MoE. Each layer has 16 experts, of which a row chooses 4 by random
routers; an expert has a quarter of the MLP's columns, at random. So a row multiplies as many weights as in the dense
model, and all of them are four times as many. Its text is nonsense, its work that of a real one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.verify.qk_norm import build, paired, write_with_norms
from model_defs.files import read_json, read_tensors, save_tensors
from redraft.errors import BundleError

EXPERTS, CHOSEN = 16, 4
console = Console()


def write_with_experts(model: Path, output: Path) -> None:
    """A Llama's folder as a Qwen3-MoE of the same attention, with random parts of its MLPs as experts. Raises
    ValueError for another family, OSError."""
    write_with_norms(model, output)
    raw, weights = read_json(output / "config.json"), read_tensors(output / "model.safetensors")
    random, columns = torch.Generator().manual_seed(0), raw["intermediate_size"] // CHOSEN
    for layer in range(raw["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp"
        dense: dict[str, Tensor] = {part: weights.pop(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")}
        for expert in range(EXPERTS):
            chosen = torch.randperm(raw["intermediate_size"], generator=random)[:columns]
            for part, weight in dense.items():
                own = weight[:, chosen] if part == "down" else weight[chosen]
                weights[f"{name}.experts.{expert}.{part}_proj.weight"] = own.contiguous()
        router = torch.randn(EXPERTS, raw["hidden_size"], generator=random)
        weights[f"{name}.gate.weight"] = router.to(torch.bfloat16)
    save_tensors(weights, output / "model.safetensors")
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": columns}
    changed = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    (output / "config.json").write_text(json.dumps(raw | changed | experts, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Write both models, build their bundles, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=Path("artifacts/models/SmolLM2-135M-Instruct"), help="a Llama's folder")
    add("--engines", type=Path, default=Path("artifacts/engines"), help="folder of the bundles and models")
    add("--precision", default="bf16", choices=("fp32", "bf16", "int8"))
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--context", type=int, default=256, help="cached tokens before the rows")
    add("--rounds", type=int, default=100, help="steps of each kind by each engine")
    add("--threads", type=int)
    add("--output", type=Path, default=Path("artifacts/reports/experts.json"))
    args = parser.parse_args(argv)
    models = [args.engines / f"{args.model.name}-{kind}" for kind in ("qk-norm", "experts")]
    folders = [args.engines / f"{model.name}-ar-{args.precision}" for model in models]
    try:
        for write, model, folder in zip((write_with_norms, write_with_experts), models, folders, strict=True):
            write(args.model, model)
            build(model, folder, args.precision)
        results = paired(folders, args.rows, args.context, args.rounds, args.threads)
    except (BundleError, OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    title = f"A step with {EXPERTS} experts, {CHOSEN} chosen, over a dense one"
    shown = Table(title, ["rows", "dense, ms", "experts, ms", "experts over dense"])
    for row in results:
        low, high = row["interval"]
        times = (f"{value:.2f}" for value in row["ms"])
        shown.rows.append([str(row["rows"]), *times, f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"])
    shown.show(console)
    sizes = {"experts": EXPERTS, "chosen": CHOSEN}
    write_json(args.output, {"precision": args.precision, "context": args.context, **sizes, "steps": results})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
