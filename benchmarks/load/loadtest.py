"""Load test: streaming requests at fixed rates against a Triton server or a bare engine worker.

    python -m benchmarks.load.loadtest --tokenizer artifacts/engines/NAME --request-rate 0.5 1 2 --result-dir out/spec

Writes one JSON file per rate and plots into the result folder and prints a table. With --baseline, compares with the
results in that folder: an earlier run's, or, with --baseline-url, those of a second server that takes turns with the
first, rate by rate, so that a busy moment of the machine hits both. Ctrl-C writes what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures import plots
from benchmarks.figures.results import Run, clear_runs, load_runs, rate_name, save_run
from benchmarks.figures.tables import run_table, speedup_table
from benchmarks.load.client import Backend, Generation, GenerationError, TritonBackend, WorkerBackend
from benchmarks.load.metrics import METRICS, Timeline, acceptance, parse_slo, summarize
from benchmarks.load.runner import open_loop, run_one
from benchmarks.load.workload import ARRIVALS, ChatTokenizer, arrival_times, pick_prompts
from redraft.console.progress import duration, progress, write
from redraft.prompts import Prompt, load_prompts
from redraft.request import AUTO_REGRESSIVE

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
SETTING = (
    "num_prompts", "max_tokens", "temperature", "top_p", "top_k", "seed", "arrival", "burstiness", "max_concurrency",
)  # fmt: skip
TABLE2 = {"request_rate": [0.1, 0.5, 1.0], "temperature": 1.0}
TABLE2_PLAN = {"construction": "beam", "beam_width": 6, "beam_length": 5}
BASELINE = "auto-regressive"
console = Console()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="loadtest", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = p.add_argument
    add("--url", default="127.0.0.1:8001", help="gRPC address of the Triton server")
    add("--metrics-url", default="http://127.0.0.1:8002/metrics", help="its metrics page, for acceptance; '' for none")
    add("--model", default="ensemble", help="Triton model")
    add("--worker", metavar="SOCKET", help="talk to the engine worker at this socket instead")
    add("--tokenizer", type=Path, required=True, help="engine bundle or model folder: tokenizer and chat template")
    add("--dataset", type=Path, default=PROMPTS, help="prompts: JSON, text lines, CSV or Parquet (default: shipped)")
    add("--column", help="field or column of --dataset that holds the prompts")
    add("--no-chat-template", action="store_true", help="send prompts as they are")
    add("--num-prompts", type=int, default=40, help="requests per rate")
    add(
        "--request-rate",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="R",
        help="requests per second; inf: all at once",
    )
    add("--arrival", choices=ARRIVALS, default="poisson")
    add("--burstiness", type=float, default=1.0, help="shape of the gaps' gamma distribution; 1 is Poisson")
    add("--max-concurrency", type=int, help="most requests in flight")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--seed", type=int, default=0, help="of arrivals, prompt order and (plus the request's number) sampling")
    add("--warmup", type=int, default=3, help="requests before the first rate that do not count")
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics whose percentiles the table shows")
    add("--goodput", "--slo", nargs="+", default=[], metavar="METRIC:MS", help="limits on ttft, tpot, e2el")
    add("--method", help="one of the bundle's methods of drafting, or auto_regressive (default: its first)")
    add("--table2", action="store_true", help="ReDrafter's Table 2: rates 0.1 0.5 1, temperature 1, beam 6 x 5")
    add("--label", default="run", help="name of this run in tables and plots")
    add("--result-dir", type=Path, default=Path("artifacts/loadtest/run"), help="earlier runs in it are replaced")
    add("--baseline", type=Path, help="result folder of an auto-regressive run to compare with")
    add(
        "--baseline-url",
        help="gRPC address of a server (or the same): measure auto-regressive decoding there, into --baseline",
    )
    add("--baseline-metrics-url", default="", help="its metrics page")
    return p


def check(args: argparse.Namespace) -> dict[str, float]:
    """Settle presets and check what argparse cannot; the service level objective. Raises ValueError."""
    if args.table2:
        vars(args).update(TABLE2)
        plan = bundle_plan(args.tokenizer, args.method).get("plan")
        if plan and any(plan.get(key) != value for key, value in TABLE2_PLAN.items()):
            raise ValueError(f"--table2 needs a method with {TABLE2_PLAN} or none, got {plan}")
    if args.baseline_url and not args.baseline:
        raise ValueError("--baseline-url needs --baseline: the folder for that server's results")
    for name in ("num_prompts", "max_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    for rate in args.request_rate:
        arrivals(args, rate)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency: expected at least 1, got {args.max_concurrency}")
    args.percentile_metrics = [name for name in args.percentile_metrics.split(",") if name]
    if unknown := set(args.percentile_metrics) - set(METRICS):
        raise ValueError(f"--percentile-metrics: expected some of {', '.join(METRICS)}, got {', '.join(unknown)}")
    return parse_slo(args.goodput)


def arrivals(args: argparse.Namespace, rate: float) -> np.ndarray:
    """When the requests of one rate are sent: float64 [num_prompts], seconds. Raises ValueError for flags out of
    range."""
    return arrival_times(rate, args.num_prompts, args.arrival, args.burstiness, args.seed)


def bundle_plan(folder: Path, method: str | None) -> dict[str, Any]:
    """Name and precision of an engine bundle, and the plan of one of its methods (None: its first); empty for a mere
    model folder. Raises ValueError for a method that the bundle lacks."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "precision" not in config:
        return {}
    methods = config["methods"]
    name = method or next(iter(methods), AUTO_REGRESSIVE)
    if name not in (*methods, AUTO_REGRESSIVE):
        raise ValueError(f"--method: expected one of {', '.join((*methods, AUTO_REGRESSIVE))}, got {name!r}")
    return {key: config[key] for key in ("name", "precision")} | {"method": name, "plan": methods.get(name)}


def build_requests(args: argparse.Namespace, prompts: list[Prompt], tokenizer: ChatTokenizer, count: int, seed: int):
    """`count` pairs of a request and its empty timeline."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    requests = []
    for index, prompt in enumerate(pick_prompts(prompts, count, seed)):
        text = prompt.turns[0] if args.no_chat_template else tokenizer.chat(prompt.turns[0])
        timeline = Timeline(prompt.question_id, prompt.category, len(tokenizer.encode(text)))
        sampled = {**sampling, "seed": args.seed + index}
        requests.append((Generation(text, args.max_tokens, sampled, method=args.method), timeline))
    return requests


async def connect(args: argparse.Namespace) -> Backend:
    """The server or the worker, as the flags say. Raises GenerationError where none answers."""
    if args.worker:
        return WorkerBackend(args.worker)
    backend = TritonBackend(args.url, args.model, args.metrics_url or None)
    if not await backend.is_live():
        await backend.close()
        raise GenerationError(f"no Triton server at {args.url}: `make serve` or `redraft serve` starts one")
    return backend


async def run_rate(
    args: argparse.Namespace, rate: float, backend: Backend, requests: list, tokenizer: ChatTokenizer, slo: dict
) -> Run:
    """One rate: send, measure, save."""
    times = arrivals(args, rate)
    before = await backend.counters()
    name = f"{args.label} at {rate_name(rate)} requests/s"
    with progress(name, len(requests), "answers", console=console) as shown:
        tokens = errors = 0

        def advance(timeline: Timeline) -> None:
            nonlocal tokens, errors
            tokens, errors = tokens + timeline.output_tokens, errors + (timeline.error is not None)
            shown.update(shown.done + 1, f"{tokens} tokens" + (f", {errors} errors" if errors else ""))

        timelines = await open_loop(backend, requests, times.tolist(), tokenizer, args.max_concurrency, advance)
    summary = summarize(timelines, slo)
    summary |= acceptance_between(before, await backend.counters())
    server = args.worker or f"{args.url}/{args.model}"
    setting = {"server": server, "plan": args.plan, "dataset": args.dataset.name}
    setting |= {name: getattr(args, name) for name in SETTING}
    run = Run(args.label, rate, setting, summary, interrupted=len(timelines) < len(requests))
    save_run(args.result_dir, run, timelines)
    return run


def acceptance_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Acceptance figures of the steps between two readings of the server's counters."""
    changes = [after.get(name, 0.0) - before.get(name, 0.0) for name in ("sequence_steps", "drafted", "accepted")]
    return acceptance(*changes)


def contenders(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The servers to measure, each as the flags of a run of its own: the one asked for last."""
    args.plan = bundle_plan(args.tokenizer, args.method)
    if not args.baseline_url:
        return [args]
    server = {"url": args.baseline_url, "metrics_url": args.baseline_metrics_url, "worker": None}
    server |= {"plan": {}, "method": AUTO_REGRESSIVE}
    return [argparse.Namespace(**{**vars(args), **server, "label": BASELINE, "result_dir": args.baseline}), args]


def say_plan(args: argparse.Namespace, servers: int) -> None:
    """Write what is sent, and how long that takes at least: a slower server's answers take longer."""
    sending = servers * sum(arrivals(args, rate)[-1] for rate in args.request_rate)
    rates = ", ".join(map(rate_name, args.request_rate))
    write(
        console,
        f"{args.num_prompts} requests of at most {args.max_tokens} tokens at each of {rates} requests/s: at least "
        f"{duration(sending)}, next to no memory and disk",
    )


async def measure(args: argparse.Namespace, slo: dict[str, float]) -> list[Run]:
    """Warm up, then every rate in turn, at each contender. The runs of the server asked for.

    Raises GenerationError when a warm-up request fails, OSError for a result folder that cannot be written.
    """
    tokenizer, prompts = ChatTokenizer(args.tokenizer), load_prompts(args.dataset, args.column)
    compared, warmup = contenders(args), max(args.warmup, 1)
    for contender in compared:
        contender.result_dir.mkdir(parents=True, exist_ok=True)
    say_plan(args, len(compared))
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        servers = []
        with progress("warm-up", warmup * len(compared), "answers", "connecting", console) as shown:
            for contender in compared:
                backend = await connect(contender)
                stack.push_async_callback(backend.close)
                servers.append((contender, backend))
                for generation, timeline in build_requests(args, prompts, tokenizer, warmup, args.seed + 1):
                    await run_one(backend, generation, timeline, tokenizer)
                    if timeline.error is not None:
                        raise GenerationError(f"{contender.label}: the warm-up request failed: {timeline.error}")
                    shown.update(shown.done + 1, "")
        for contender, _ in servers:
            clear_runs(contender.result_dir)
        for rate in args.request_rate:
            for contender, backend in servers:
                requests = build_requests(args, prompts, tokenizer, args.num_prompts, args.seed)
                run = await run_rate(contender, rate, backend, requests, tokenizer, slo)
                if contender is args:
                    runs.append(run)
                if run.interrupted:
                    console.print("[yellow]interrupted: what had ended is written")
                    return runs
    return runs


def main(argv: list[str] | None = None) -> int:
    """Run the load test; the exit status is 1 when a request failed and 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        slo = check(args)
        runs = asyncio.run(measure(args, slo))
        if not runs:
            return 130
        run_table(runs, args.percentile_metrics).show(console)
        plots.load_test([runs], args.result_dir)
        if args.baseline:
            baseline = load_runs(args.baseline)
            speedup_table(baseline, [runs]).show(console)
            plots.load_test([baseline, runs], args.result_dir)
    except (ValueError, OSError, GenerationError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("loadtest: interrupted", file=sys.stderr)
        return 130
    for run in runs:
        for message, count in run.summary["error_messages"].items():
            console.print(f"[red]{rate_name(run.request_rate)} requests/s: {count} failed: {message}")
    console.print(f"written to {args.result_dir}")
    return 130 if runs[-1].interrupted else int(any(run.summary["errors"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
