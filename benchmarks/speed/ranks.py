"""Teacher data and training by several ranks on one machine, beside one process with as many threads.

    python -m benchmarks.speed.ranks --count 2

One process with one thread, one process with `--count` threads, and `--count` ranks with one thread each. Of
`redraft distill` the steps of all ranks at a time are timed, with every slot taken, as in the middle of a long run;
a figure is the median of REPEATS. `redraft train` trains, and its log has the rate, from the first step to the last.
Ranks train with the batch of one process, of which each has its share, and with one that is `--count` times as large.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import Report, run
from redraft.cli.distill import engine_of, teacher_engine
from redraft.cli.options import ModelOption
from redraft.cli.steps import Steps
from redraft.home import DEFAULT_MODEL
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table, number
from redraft.model_defs.drafters.registry import DRAFTERS, RECURRENT
from redraft.training.conversations import Generator
from redraft.training.forward import EngineForward
from redraft.training.ranks import ranked, this_rank

NAME = "benchmarks.speed.ranks"
BATCH = DRAFTERS[RECURRENT].recipe.batch
REPEATS = 15


@ranked("ranks", "no figure")
def print_distill_rate(engine: str, threads: int) -> None:
    """On every rank: time steps of a bundle. The first one prints the tokens a second of all."""
    generator = Generator(EngineForward(Path(engine), threads), set(), [], 0)
    ranks = this_rank()
    rates = [sum(ranks.gather(generator.rate())) for _ in range(REPEATS)]
    if ranks.first:
        print(median(rates))


def output_of(ranks: int, program: list[str]) -> str:
    """What a Python program writes that `ranks` ranks run."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python", sys.executable]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *program]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def distill_rate(engine: Path, ranks: int, threads: int) -> float:
    """Tokens a second that ranks write."""
    return float(output_of(ranks, ["-c", f"import {NAME} as b; b.print_distill_rate({str(engine)!r}, {threads})"]))


def train_rate(model: Path, data: Path, positions: int, ranks: int, threads: int, batch: int) -> float:
    """Positions a second that ranks train on."""
    drafter = data.with_name(f"drafter-{ranks}-{threads}-{batch}")
    words = ["--model", str(model), "--data", str(data), "--output", str(drafter), "--positions", str(positions)]
    words += ["--batch", str(batch), "--threads", str(threads), "--every", "1000", "--held-out-shards", "0"]
    output_of(ranks, ["-m", "redraft", "train", *words])
    return json.loads((drafter / "log.jsonl").read_text().splitlines()[-1])["rate"]


def main(
    model: ModelOption = Path(DEFAULT_MODEL),
    count: Annotated[int, typer.Option(min=2, help="Ranks, and threads of the one process beside them.")] = 2,
    positions: Annotated[int, typer.Option(min=1, help="Positions to train on.")] = 6_000,
    output: Report = Path("artifacts/reports/ranks.json"),
) -> None:
    """Tokens and positions a second of one process and of several ranks."""
    ways = ((1, 1), (1, count), (count, 1))
    with tempfile.TemporaryDirectory() as folder:
        data, steps = Path(folder) / "data", Steps("ranks")
        teacher_engine(model, data, None, steps)
        rates = {"distill": [distill_rate(engine_of(data), *way) for way in ways]}
        steps.run("distill", "--model", model, "--output", data, "--tokens", 2000, "--bundle", engine_of(data))
        trained = [(*way, BATCH) for way in ways] + [(count, 1, count * BATCH)]
        rates["train"] = [train_rate(model, data, positions, *way) for way in trained]
    figures: dict[str, Any] = {"positions": positions}
    table = Table("Ranks on one machine", ["command", "ranks", "threads of each", "batch", "per second", "speed-up"])
    for name, of_name in rates.items():
        figures[name] = []
        for (ranks, threads, batch), rate in zip(trained, of_name, strict=False):
            row: dict[str, Any] = {"ranks": ranks, "threads": threads} | ({"batch": batch} if name == "train" else {})
            row |= {"per_second": round(rate, 1), "speedup": round(rate / of_name[0], 2)}
            figures[name].append(row)
            shown = str(row.get("batch", "-"))
            table.rows.append([name, str(ranks), str(threads), shown, number(rate), f"{row['speedup']:.2f}x"])
    finish(output, figures, table)


if __name__ == "__main__":
    run(main)
