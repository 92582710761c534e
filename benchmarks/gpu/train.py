"""Distil and train drafters on a GPU with 10 times the tokens and positions of those that ship.

    python -m benchmarks.gpu.train --model MODEL --prompts PROMPTS --output FOLDER

In pieces of `--minutes`: the same command goes on after the last shard and the last checkpoint, until it says that all
is done. First the target answers prompts, many at a time, into FOLDER/data until there are `--tokens`; then the
drafters of `--kinds` (all that ship) are trained one after the other, each on `--positions`; last, each is judged
beside the one that ships, on conversations in FOLDER/held-out whose prompts the target has written itself: among so
many tokens the prompts of a file come up several times, those of its held-out shards too. Worth keeping are
FOLDER/KIND/drafter.safetensors, config.json and log.jsonl, and the report, which on a GPU lies beside this script too;
to go on elsewhere, the whole of FOLDER.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.gpu.machine import PACKAGES, describe, device_of

ROOT = Path(__file__).parents[2]
BATCHES = {"recurrent": 128, "medusa": 128}
"""Windows of a training step on a GPU, where a step should be much longer than its launches; others: 16."""
LEAST_SECONDS = 20
"""Less is not worth beginning."""
HELD_OUT_SEED = 1_000_000
"""Seed of the held-out conversations, far from the teacher's seeds, which are the numbers of its shards."""
HELD_OUT_DOCUMENTS = 24
"""Documents of a shard that a drafter is judged on."""
SHARDS = "shard-*.safetensors"
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


def distil_command(args: argparse.Namespace, folder: Path, tokens: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "build/distill.py", "--model", str(args.model), "--prompts", str(args.prompts)),
        *("--output", str(folder), "--tokens", str(tokens), "--max-new-tokens", str(args.max_new_tokens)),
        *(("--shares", args.shares) if args.shares else ()),
        *more,
    ]


def train_command(args: argparse.Namespace, kind: str) -> list[str]:
    return [
        *(sys.executable, "build/train_drafter.py", "--model", str(args.model), "--kind", kind),
        *("--data", str(args.output_folder / "data"), "--output", str(args.output_folder / kind)),
        *("--positions", str(args.positions), "--batch", str(args.batch or BATCHES.get(kind, 16))),
        *("--every", str(args.every), "--held-out", str(args.held_out), "--hot-vocabulary", str(args.hot_vocabulary)),
        *(("--window", str(args.window)) if args.window else ()),
    ]


def judge_command(args: argparse.Namespace, output: Path) -> list[str]:
    """The drafters that ship and the new ones, in turn, on the conversations that are held out."""
    held_out, data = args.output_folder / "held-out", args.output_folder / "data"
    return [
        *(sys.executable, "-m", "benchmarks.verify.held_out"),
        *(str(folder) for kind in args.kinds for folder in (args.shipped[kind], args.output_folder / kind)),
        *("--model", str(args.model), "--data", str(held_out), "--data", str(data)),
        *("--held-out", str(len(list(held_out.glob(SHARDS)))), "--output", str(output)),
    ]


def last_line(log: Path) -> dict[str, Any]:
    """What a training logged last: nothing, where it has logged nothing."""
    lines = log.read_text().splitlines() if log.exists() else []
    return json.loads(lines[-1]) if lines else {}


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """The sequence as far as its time reaches, what is done left out; what each command came to. `done`: all of it."""
    deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {"done": False, "distil": {}, "drafters": {}, "judged": None}

    def run(what: str, command: list[str]) -> int | None:
        """Its exit status; None where the time was over before its end."""
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            console.print(f"{what}: not begun, the time is over")
            return None
        return run_until(command, left)

    judging = ("--self-written", "1", "--seed", str(HELD_OUT_SEED), "--shard-documents", str(HELD_OUT_DOCUMENTS))
    teaching = ("--slots", str(args.slots), "--shard-documents", str(args.shard_documents))
    for name, tokens, more in (("held-out", args.held_out_tokens, judging), ("data", args.tokens, teaching)):
        folder = args.output_folder / name
        status = run(name, distil_command(args, folder, tokens, *more))
        shards = sorted(folder.glob(SHARDS))
        size = sum(file.stat().st_size for file in shards)
        report["distil"][name] = {"exit_status": status, "shards": len(shards), "bytes": size}
        if status != 0:
            return report
    for kind in args.kinds:
        log, status = args.output_folder / kind / "log.jsonl", 0
        if last_line(log).get("positions", 0) < args.positions:
            status = run(kind, train_command(args, kind))
        report["drafters"][kind] = {"exit_status": status, "last": last_line(log) or None}
        if status != 0:
            return report
    output = args.output_folder / "judged.json"
    status = run("judging", judge_command(args, output))
    report["judged"] = {"exit_status": status, "drafters": None}
    if status == 0:
        report["judged"]["drafters"] = json.loads(output.read_bytes())["rows"]
    report["done"] = status == 0
    return report


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 where a command failed; running out of time is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, required=True, help="a folder made by redraft fetch")
    parser.add_argument("--prompts", type=Path, required=True, help="a file of prompts, see redraft distill")
    parser.add_argument("--output", dest="output_folder", type=Path, required=True, help="folder; its report.json too")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this piece; a command may end a minute later")
    parser.add_argument("--drafters", type=Path, default=ROOT / "build/drafters.toml", help="those that ship, by kind")
    parser.add_argument("--kinds", nargs="+", help="some of them; default: all, one after the other")
    parser.add_argument("--tokens", type=int, default=90_000_000, help="of teacher data; 1.16 kB each on disk")
    parser.add_argument("--positions", type=int, default=240_000_000, help="that each drafter is trained on")
    parser.add_argument("--held-out-tokens", type=int, default=100_000, help="of conversations that judge")
    parser.add_argument("--slots", type=int, default=1024, help="conversations side by side")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--shard-documents", type=int, default=1024)
    parser.add_argument("--shares", help="of the prompts' sources, see redraft distill")
    parser.add_argument("--batch", type=int, help="windows of a training step")
    parser.add_argument("--window", type=int, help="positions of a window")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--held-out", type=int, default=4, help="shards kept for the log's acceptance")
    parser.add_argument("--hot-vocabulary", type=int, default=12288)
    args = parser.parse_args(argv)
    shipped = tomllib.loads(args.drafters.read_text())
    args.shipped = {kind: ROOT / method["drafter"] for kind, method in shipped.items()}
    args.kinds = args.kinds or list(args.shipped)
    if unknown := set(args.kinds) - set(args.shipped):
        parser.error(f"--kinds {' '.join(sorted(unknown))}: expected some of {', '.join(args.shipped)}")
    args.output_folder = args.output_folder.resolve()
    args.output = args.output_folder / "report.json"
    device = device_of(parser, args, PACKAGES)
    report = {"machine": describe(device), **run_all(args)}
    beside = [Path(__file__).with_suffix(".json")] if device.type == "cuda" else []
    for path in (args.output, *beside):
        write_json(path, report)
        console.print(f"written to {path}")
    console.print("all is done" if report["done"] else "not all is done: the same command goes on")
    entries = [*report["distil"].values(), *report["drafters"].values(), report["judged"] or {}]
    return int(any(entry.get("exit_status") for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
