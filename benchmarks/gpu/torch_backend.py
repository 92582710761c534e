"""SmolLM2 by the torch backend with CUDA graphs and our kernels, with each shipped drafter.

    python -m benchmarks.gpu.torch_backend --model artifacts/models/SmolLM2-135M-Instruct

Builds bundles of all methods of `benchmarks/gpu/methods.toml` and, for auto-regressive decoding, bundles without
drafter and hidden states, in fp32 and bf16. Then asks: does every method give auto-regressive decoding's tokens in fp32
(`benchmarks/verify/lossless.py`), how fast is it beside that at 1 to 64 requests at once
(`benchmarks/speed/method_batches.py`: the better of two rounds), and how fast are single steps
(`benchmarks/speed/step_times.py`)? The report is written after each command. Bundles and results that are there
already are kept, and the exit status of a command that failed but wrote its result (`RESULT.exit_status`): after an
interruption or with more `--parts` the same command goes on. With `--minutes` no part begins after so many. Methods
whose drafter is not here are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.machine import PACKAGES, add_device, describe, device_of, write_report

ROOT = Path(__file__).parents[2]
PRECISIONS = ("fp32", "bf16")
console = Console()


def commands(args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """What each part runs, in order. The last argument of a command is what it writes."""
    work: Path = args.work
    bundles = {precision: str(work / f"methods-{precision}") for precision in PRECISIONS}
    plain = {precision: str(work / f"ar-{precision}") for precision in PRECISIONS}
    limits = ["--slots", str(max(args.batches)), "--max-len", str(args.max_len), "--max-tree", "32"]
    methods = ["--methods", str(args.methods)]
    asked = ["--num-prompts", str(args.num_prompts), "--max-tokens", str(args.max_tokens)]
    if args.dataset:
        asked += ["--dataset", str(args.dataset)]
    batches = ["--batches", *map(str, args.batches), "--warm-up", str(args.warm_up)]
    settings = ["--settings", "greedy", "temperature 1", "--concurrency", "1", "8"]

    def module(name: str, *arguments: str, output: str) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--output", str(work / output)]

    build = [sys.executable, "build/build_engines.py", "--backend", "torch", "--model", str(args.model), *limits]
    pair = {precision: ["--auto-regressive", plain[precision]] for precision in PRECISIONS}
    compare = ["--speculative", bundles["fp32"], *pair["fp32"], *asked, *settings]
    return {
        "build": [
            [*build, *flags, "--precision", precision, "--output", built[precision]]
            for built, flags in ((bundles, methods), (plain, ["--no-drafter"]))
            for precision in PRECISIONS
        ],
        "equality": [module("verify.lossless", *compare, output="equality.json")],
        "steps": [
            module("speed.step_times", bundles["bf16"], output="steps.json"),
            module("speed.step_times", plain["bf16"], output="steps-ar.json"),
        ],
        "batches": [
            module(
                "speed.method_batches",
                "--bundle",
                bundles["bf16"],
                *pair["bf16"],
                *asked,
                *batches,
                output="batches.json",
            )
        ],
    }


def methods_here(path: Path, work: Path) -> Path:
    """The file of methods, or a copy with only those whose drafters are here. Raises ValueError where none is."""
    methods = tomllib.loads((ROOT / path).read_text())
    found = {name: settings for name, settings in methods.items() if (ROOT / settings["drafter"]).is_dir()}
    if not found:
        raise ValueError(f"{path}: none of its drafters is here: bring their folders along")
    if found == methods:
        return path
    console.print(f"left out, as their drafters are not here: {', '.join(sorted({*methods} - {*found}))}")
    copy = work / "methods.toml"
    lines = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())])
        for name, settings in found.items()
    ]
    copy.write_text("\n\n".join(lines) + "\n")
    return copy


def run_parts(args: argparse.Namespace, save: Callable[[dict[str, Any]], Path]) -> dict[str, Any]:
    """Run what is asked for and not there yet; the exit status and seconds of each command, and what it wrote. All that
    is known is saved after each command."""
    started, report = time.monotonic(), dict[str, Any]()
    for part, listed in commands(args).items():
        if part not in args.parts:
            continue
        if args.minutes and time.monotonic() - started > 60 * args.minutes:
            console.print(f"{part}: not begun, {args.minutes:g} minutes are over")
            continue
        report[part] = []
        for command in listed:
            output = Path(command[-1])
            failure = output.with_name(f"{output.name}.exit_status")
            entry: dict[str, Any] = {"command": " ".join(command[1:])}
            if not output.exists():
                console.print(f"{part}: {entry['command']}", markup=False)
                begun = time.monotonic()
                entry["exit_status"] = subprocess.run(command, cwd=ROOT).returncode
                entry["seconds"] = time.monotonic() - begun
                failure.unlink(missing_ok=True)
                if entry["exit_status"]:
                    failure.write_text(str(entry["exit_status"]))
            elif failure.exists():
                entry["exit_status"] = int(failure.read_text())
            if output.is_file():
                entry["result"] = json.loads(output.read_bytes())
            report[part].append(entry)
            save(report)
    return report


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 where a command failed, an inequality included."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    parser.add_argument("--model", type=Path, required=True, help="a folder made by redraft fetch")
    parser.add_argument("--methods", type=Path, default=Path("benchmarks/gpu/methods.toml"))
    parser.add_argument("--work", type=Path, default=Path("artifacts/gpu"), help="folder for bundles and results")
    parser.add_argument("--parts", nargs="+", choices=("build", "equality", "steps", "batches"),
                        default=["build", "equality", "steps", "batches"])  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no part after so many")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--dataset", type=Path, help="default: benchmarks/prompts.jsonl")
    args = parser.parse_args(argv)
    device = device_of(parser, args, PACKAGES, kernels=True)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        args.methods = methods_here(args.methods, args.work)
    except ValueError as error:
        parser.error(str(error))

    def save(parts: dict[str, Any]) -> Path:
        return write_report(args, {"machine": describe(device), "parts": parts})

    parts = run_parts(args, save)
    console.print(f"written to {save(parts)}")
    return int(any(entry.get("exit_status") for listed in parts.values() for entry in listed))


if __name__ == "__main__":
    sys.exit(main())
