"""What tensor parallelism costs and gains: a step's compute and communication, and ReDrafter's Table 3.

    python -m benchmarks.speed.tensor_parallel measure --auto-regressive AR --bundle BUNDLE --threads 1 \\
      --output one.json
    python -m benchmarks.speed.tensor_parallel measure --auto-regressive AR_2 --bundle BUNDLE_2 --threads 1 \\
      --output two.json
    python -m benchmarks.speed.tensor_parallel report one.json two.json

`measure` takes a bundle of benchmarks/methods/tensor_parallel.toml and one without drafter, for as many ranks, which
it starts: step times of the first over a number of rows, then one stream (as the paper does: batch size 1) by every
method of it and by the other, whose workers take turns. With several ranks a step falls into compute of rank 0; sums,
in which it also waits for slower ranks (beside them, what the same sums take when nothing else is done: pure
communication); and what comes before and after the networks: rank 0 sends the batch, and gathers the logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console

from benchmarks.figures.results import save_report, write_json
from benchmarks.figures.tables import Table, number
from benchmarks.load.comparison import AR, WARM_UP, compare, report_single
from benchmarks.load.served import Served, worker_of
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import load_llm
from benchmarks.speed.step_times import CONTEXT
from redraft.batch import TargetBatch
from redraft.bundle.backends import OPENVINO
from redraft.bundle.manifest import Bundle
from redraft.decoding.token_tree import mask_width
from redraft.engines.api import Engine
from redraft.engines.ranks.parallel import ParallelEngine
from redraft.errors import BundleError
from redraft.llm import LLM
from redraft.plugins import kernels
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, request
from redraft.serving.ranks import launch_command

ROWS = (1, 8, 16, 31)
SUMS_A_LAYER = 2
console = Console()


def pure_sums(bundle: Bundle, repeats: int) -> dict[int, float]:
    """Median milliseconds of all of a step's sums on their own, by rows; every rank must call it."""
    from mpi4py import MPI

    from redraft.plugins.operators.all_reduce import mpi

    mpi.connect(MPI.COMM_WORLD)
    kernels.set_threads(1)
    target, found = bundle.config.target, {}
    for rows in ROWS:
        x = np.ones((rows, target.hidden_size), np.float32)
        took = []
        for _ in range(repeats):
            started = time.perf_counter()
            for _ in range(SUMS_A_LAYER * target.num_layers):
                kernels.all_reduce(x)
            took.append((time.perf_counter() - started) * 1e3)
        found[rows] = statistics.median(took)
    return found


def time_steps(llm: LLM, repeats: int, sums_ms: dict[int, float]) -> list[dict[str, float]]:
    """Median milliseconds of a step and of its parts, by rows."""
    engine, limits = llm.runtime.engine, llm.runtime.limits
    batches = {rows: TargetBatch.causal(1, rows, CONTEXT, mask_width(limits.max_tree)) for rows in ROWS}
    found = []
    for rows, batch in batches.items():
        engine.execute(batch)
        steps, sums, others = [], [], []
        for _ in range(repeats):
            kernels.take_exchange_seconds()
            with between_ranks(engine) as took:
                started = time.perf_counter()
                engine.execute(batch)
                steps.append((time.perf_counter() - started) * 1e3)
            sums.append(kernels.take_exchange_seconds() * 1e3)
            others.append(sum(took))
        parts = {
            "step_ms": steps,
            "compute_ms": [step - summed - other for step, summed, other in zip(steps, sums, others, strict=True)],
            "sums_ms": sums,
            "send_and_gather_ms": others,
        }
        medians = {name: statistics.median(values) for name, values in parts.items()}
        found.append({"rows": rows, **medians, "pure_sums_ms": sums_ms.get(rows, 0.0)})
    return found


@contextmanager
def between_ranks(engine: Engine) -> Iterator[list[float]]:
    """Fills a list with the milliseconds of each time that the engine sends a batch or gathers logits."""
    took: list[float] = []
    if not isinstance(engine, ParallelEngine):
        yield took
        return

    def timed(act: Callable[..., Any]) -> Callable[..., Any]:
        def timed_act(*given: Any) -> Any:
            started = time.perf_counter()
            result = act(*given)
            took.append((time.perf_counter() - started) * 1e3)
            return result

        return timed_act

    own: Any = engine.own
    with patch.object(engine.ranks, "send", timed(engine.ranks.send)), patch.object(own, "gather", timed(own.gather)):
        yield took


def steps(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Step times of a bundle, written to --output by rank 0; every rank must call it."""
    bundle = Bundle.load(args.bundle)
    ranks = bundle.config.tensor_parallel
    sums_ms = pure_sums(bundle, args.steps) if ranks > 1 and find_spec("mpi4py") else {}
    llm = load_llm(parser, args.bundle, args.threads)
    report = {
        "ranks": ranks,
        "threads": kernels.threads(),
        "precision": bundle.config.precision,
        "steps": time_steps(llm, args.steps, sums_ms),
    }
    llm.close()
    write_json(args.output, report)


def decode(args: argparse.Namespace, methods: Iterable[str]) -> dict[str, Any]:
    """One stream by every method, at every temperature: see `benchmarks.speed.single_stream`."""
    tokenizer, prompts = ChatTokenizer(args.bundle), spread(load_prompts(args.dataset), args.num_prompts)
    texts = [tokenizer.chat(prompt.turns[0]) for prompt in prompts]
    found = {}
    with worker_of(args.auto_regressive, args.threads) as base, worker_of(args.bundle, args.threads) as drafting:
        decoders = {AR: Served(base, AUTO_REGRESSIVE)} | {name: Served(drafting, name) for name in methods}
        for temperature in args.temperature:
            asked = [request(text, args.max_tokens, temperature=temperature, seed=i) for i, text in enumerate(texts)]
            warm_up = [request(tokenizer.chat(WARM_UP), args.max_tokens, temperature=temperature)]
            players = compare(decoders, asked, warm_up, args.repeats, lambda: None)
            found[f"{temperature:g}"] = report_single(players, prompts)
    return found


def measure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything of one bundle, written to --output."""
    try:
        bundle, base = Bundle.load(args.bundle), Bundle.load(args.auto_regressive)
    except BundleError as error:
        parser.error(str(error))
    ranks = bundle.config.tensor_parallel
    if ranks > 1 and bundle.config.backend != OPENVINO:
        parser.error(f"{args.bundle} is for {bundle.config.backend}: expected openvino, whose sums can be timed")
    for name in ("backend", "precision", "tensor_parallel"):
        if getattr(base.config, name) != getattr(bundle.config, name):
            parser.error(
                f"--auto-regressive {args.auto_regressive}: expected {name} {getattr(bundle.config, name)} as of "
                f"{args.bundle}, got {getattr(base.config, name)}"
            )
    part = args.output.with_suffix(".steps.json")
    command = [sys.executable, "-m", "benchmarks.speed.tensor_parallel", "steps", "--bundle", str(args.bundle)]
    command += ["--steps", str(args.steps), "--output", str(part)]
    command += [] if args.threads is None else ["--threads", str(args.threads)]
    try:
        subprocess.run(launch_command(command, ranks), check=True)
        report = json.loads(part.read_bytes())
        part.unlink()
        report |= {"max_tokens": args.max_tokens, "decoding": decode(args, bundle.config.methods)}
    except (RuntimeError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    write_json(args.output, report)
    for table in tables([report]):
        table.show(console)


def label(report: dict[str, Any]) -> str:
    """Ranks and threads, as tables name them."""
    threads = report["threads"]
    return f"TP {report['ranks']}, {threads} thread{'s' if threads > 1 else ''} a rank"


def tables(reports: list[dict[str, Any]]) -> list[Table]:
    """Step times, then Table 3 for each temperature."""
    columns = ["", "rows", "step ms", "compute", "sums", "pure sums", "send and gather"]
    found = [Table(f"A step over a context of {CONTEXT}, milliseconds", columns)]
    keys = ("step_ms", "compute_ms", "sums_ms", "pure_sums_ms", "send_and_gather_ms")
    for report in reports:
        for step in report["steps"]:
            found[0].rows.append([label(report), str(step["rows"]), *(number(step[key], 2) for key in keys)])
    for temperature in reports[0]["decoding"]:
        title = f"Tokens/s of one stream, temperature {temperature}: speed-up, acceptance length, drafting share"
        methods = list(reports[0]["decoding"][temperature]["contenders"])
        found.append(Table(title, ["", *methods]))
        for report in reports:
            contenders = report["decoding"][temperature]["contenders"]
            found[-1].rows.append([label(report), *(_cell(name, contenders[name]) for name in methods)])
    return found


def _cell(name: str, entry: dict[str, Any]) -> str:
    speed = number(entry["tokens_per_s"])
    if name == AR:
        return speed
    return f"{speed} ({entry['speedup']:.2f}x, {entry['acceptance_length']:.2f}, {entry['drafting_share']:.0%})"


def main(argv: list[str] | None = None) -> int:
    """Measure a bundle, or put the reports of several side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    alone = commands.add_parser("steps", help="step times alone; each rank runs this (mpiexec)")
    both = commands.add_parser("measure", help="measure a bundle")
    for command in (alone, both):
        command.add_argument("--bundle", type=Path, required=True)
        command.add_argument("--threads", type=int, help="of each rank (default: its share of the cores)")
        command.add_argument("--steps", type=int, default=100, help="executions for a step's time")
        command.add_argument("--output", type=Path, required=True)
    add = both.add_argument
    add("--auto-regressive", type=Path, required=True, help="bundle without drafter, for as many ranks")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, default=16, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--repeats", type=int, default=3)
    add = commands.add_parser("report", help="put reports side by side").add_argument
    add("reports", type=Path, nargs="+")
    add("--output", type=Path, help="write them all to this JSON file")
    args = parser.parse_args(argv)
    if args.command != "report":
        (steps if args.command == "steps" else measure)(parser, args)
        return 0
    reports = [json.loads(path.read_bytes()) for path in args.reports]
    for table in tables(reports):
        table.show(console)
        if args.output:
            console.print(table.markdown(), soft_wrap=True)
    if args.output:
        save_report(args.output, {"rows": reports})
    return 0


if __name__ == "__main__":
    sys.exit(main())
