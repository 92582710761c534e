"""Distil and train drafters on a GPU with 10 to 100 times the tokens of a CPU. Not run on a GPU yet.

    python -m benchmarks.gpu.train --model MODEL --prompts PROMPTS --output FOLDER --minutes 25

The target answers prompts, many at a time, into FOLDER/data until there are `--tokens`, or `--distil-share` of the time
is over; then the drafters are trained one after the other, each with an equal share of the time that is left, on
`--positions`. Learning rates decay over `--positions`: choose as many as the time allows (log.jsonl has the rate). What
is there is kept: the same command goes on, after the last shard and the last checkpoint. Worth keeping are FOLDER/KIND/
drafter.safetensors, config.json and log.jsonl, and the report, which on a GPU lies beside this script too; teacher data
is large and quickly made again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.machine import describe, device_of
from benchmarks.results import write_json
from model_defs.drafters import DRAFTERS

ROOT = Path(__file__).parents[2]
BATCHES = {"recurrent": 128, "medusa": 128}
"""Windows of a training step on a GPU, where a step should be much longer than its launches; others: 16."""
LEAST_SECONDS = 20
"""Less is not worth beginning."""
console = Console()


def run_until(command: list[str], seconds: float) -> int | None:
    """Run a command, interrupt it after so many seconds, and return its exit status; None: interrupted."""
    console.print(f"{seconds / 60:.1f} min: {' '.join(command[1:])}", markup=False)
    # Where this runs in the background, the shell may have it ignore interrupts; the command must not.
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def distil_command(args: argparse.Namespace) -> list[str]:
    return [
        *(sys.executable, "build/distill.py", "--model", str(args.model), "--prompts", str(args.prompts)),
        *("--output", str(args.output_folder / "data"), "--tokens", str(args.tokens), "--slots", str(args.slots)),
        *("--shard-documents", str(args.shard_documents), "--max-new-tokens", str(args.max_new_tokens)),
        *(("--shares", args.shares) if args.shares else ()),
    ]


def train_command(args: argparse.Namespace, kind: str) -> list[str]:
    return [
        *(sys.executable, "build/train_drafter.py", "--model", str(args.model), "--drafter", kind),
        *("--data", str(args.output_folder / "data"), "--output", str(args.output_folder / kind)),
        *("--positions", str(args.positions), "--batch", str(args.batch or BATCHES.get(kind, 16))),
        *("--every", str(args.every), "--held-out", str(args.held_out), "--hot-vocabulary", str(args.hot_vocabulary)),
        *(("--window", str(args.window)) if args.window else ()),
    ]


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """The sequence inside its time; what each command came to."""
    deadline = time.monotonic() + 60 * args.minutes
    status = run_until(distil_command(args), args.distil_share * 60 * args.minutes)
    shards = sorted((args.output_folder / "data").glob("shard-*.safetensors"))
    report: dict[str, Any] = {
        "distil": {"exit_status": status, "shards": len(shards), "bytes": sum(file.stat().st_size for file in shards)},
        "drafters": {},
    }
    if status or not shards:
        return report
    for place, kind in enumerate(args.kinds):
        seconds = (deadline - time.monotonic()) / (len(args.kinds) - place)
        if seconds < LEAST_SECONDS:
            console.print(f"{kind}: not begun, the time is over")
            break
        log = args.output_folder / kind / "log.jsonl"
        status = run_until(train_command(args, kind), seconds)
        lines = log.read_text().splitlines() if log.exists() else []
        report["drafters"][kind] = {"exit_status": status, "last": json.loads(lines[-1]) if lines else None}
    return report


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 where a command failed; running out of time is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, required=True, help="a folder made by build/fetch_model.py")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, see build/distill.py")
    parser.add_argument("--output", dest="output_folder", type=Path, required=True, help="folder; its report.json too")
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything")
    parser.add_argument("--distil-share", type=float, default=0.4, help="of the time")
    parser.add_argument("--kinds", nargs="+", choices=DRAFTERS, default=["recurrent"])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--positions", type=int, default=40_000_000)
    parser.add_argument("--slots", type=int, default=1024, help="conversations side by side")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--shard-documents", type=int, default=1024)
    parser.add_argument("--shares", help="of the prompts' sources, see build/distill.py")
    parser.add_argument("--batch", type=int, help="windows of a training step")
    parser.add_argument("--window", type=int, help="positions of a window")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--held-out", type=int, default=4, help="shards kept for evaluation")
    parser.add_argument("--hot-vocabulary", type=int, default=12288)
    args = parser.parse_args(argv)
    args.output_folder = args.output_folder.resolve()
    args.output = args.output_folder / "report.json"
    device = device_of(parser, args)
    report = {"machine": describe(device), **run_all(args)}
    beside = [Path(__file__).with_suffix(".json")] if device.type == "cuda" else []
    for path in (args.output, *beside):
        write_json(path, report)
        console.print(f"written to {path}")
    failed = [report["distil"]["exit_status"], *(entry["exit_status"] for entry in report["drafters"].values())]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
