"""What Triton costs: the same requests, one at a time, through the server and straight to its engine worker.

    python -m benchmarks.load.compare_triton --tokenizer BUNDLE --worker artifacts/run/worker.sock

Both talk to the one worker of a running service and take turns, so that only the server differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table, number
from benchmarks.load.clients.base import Client, Generation, GenerationError
from benchmarks.load.clients.triton_grpc import TritonGrpc
from benchmarks.load.clients.worker import BareWorker
from benchmarks.load.metrics import Timeline
from benchmarks.load.runner import run_one
from benchmarks.load.workload import ChatTokenizer
from redraft.console.progress import tracked
from redraft.prompts import load_prompts, spread

console = Console()
TRITON, WORKER = "Triton", "bare worker"


async def compare(
    clients: dict[str, Client], generations: list[Generation], tokenizer: ChatTokenizer, repeats: int
) -> dict[str, list[list[Timeline]]]:
    """Per client and repeat the timelines of all generations. Raises GenerationError when one fails."""
    runs: dict[str, list[list[Timeline]]] = {name: [] for name in clients}
    for client in clients.values():
        await run_one(client, generations[0], Timeline("warm-up", ""), tokenizer)
    for repeat in tracked(range(repeats), "taking turns", "rounds", console):
        for run in runs.values():
            run.append([])
        for index, generation in enumerate(generations):
            order = list(clients.items())
            for name, client in order if (index + repeat) % 2 == 0 else reversed(order):
                timeline = await run_one(client, generation, Timeline(str(index), ""), tokenizer)
                if timeline.error is not None:
                    raise GenerationError(f"{name}: {timeline.error}")
                runs[name][-1].append(timeline)
    return runs


def report(runs: dict[str, list[list[Timeline]]]) -> dict[str, Any]:
    """Tokens per second and mean TTFT of each client (medians over repeats, per prompt), and Triton's extra time."""
    figures: dict[str, Any] = {}
    for name, repeats in runs.items():
        seconds = sum(median(t.e2el for t in prompt) for prompt in zip(*repeats, strict=True)) / 1e3
        ttft = [median(t.ttft or 0.0 for t in prompt) for prompt in zip(*repeats, strict=True)]
        tokens = sum(t.output_tokens for t in repeats[-1])
        figures[name] = {"tokens_per_s": tokens / seconds, "ttft_ms": sum(ttft) / len(ttft), "seconds": seconds}
    figures["same_texts"] = [t.text for t in runs[TRITON][-1]] == [t.text for t in runs[WORKER][-1]]
    figures["overhead"] = figures[TRITON]["seconds"] / figures[WORKER]["seconds"] - 1
    return figures


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Connect to both, compare, report."""
    tokenizer = ChatTokenizer(args.tokenizer)
    prompts = spread(load_prompts(args.dataset), args.num_prompts)
    sampling = {"temperature": args.temperature, "seed": 0}
    generations = [Generation(tokenizer.chat(prompt.turns[0]), args.max_tokens, sampling) for prompt in prompts]
    clients: dict[str, Client] = {TRITON: TritonGrpc(args.url), WORKER: BareWorker(str(args.worker))}
    try:
        return report(await compare(clients, generations, tokenizer, args.repeats))
    finally:
        for client in clients.values():
            await client.close()


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON; the exit status is 1 when Triton costs more than --limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, help="the bundle that is served")
    add("--worker", type=Path, default=Path("artifacts/run/worker.sock"), help="socket of the service's worker")
    add("--url", default="127.0.0.1:8001", help="gRPC address of the service")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, default=10)
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--repeats", type=int, default=3)
    add("--limit", type=float, default=0.05, help="largest accepted share of extra time")
    add("--output", type=Path, default=Path("artifacts/reports/triton_overhead.json"))
    args = parser.parse_args(argv)
    try:
        figures = asyncio.run(measure(args))
    except (GenerationError, ValueError, FileNotFoundError) as error:
        print(f"compare_triton: {error}", file=sys.stderr)
        return 2
    write_json(args.output, figures)
    table = Table("One stream", ["through", "tokens/s", "TTFT, ms"])
    for name in (TRITON, WORKER):
        table.rows.append([name, number(figures[name]["tokens_per_s"]), number(figures[name]["ttft_ms"])])
    table.show(console)
    console.print(f"Triton takes {figures['overhead']:+.1%} time; same texts: {figures['same_texts']}")
    return int(figures["overhead"] > args.limit)


if __name__ == "__main__":
    sys.exit(main())
