"""What long prompts cost their neighbours: a running stream, and short prompts that come meanwhile.

    python -m benchmarks.load.fairness BUNDLE --output fairness.json
    python -m benchmarks.load.fairness BUNDLE --before ../older/checkout --output fairness.json

So many clients each send one long prompt after the other. Beside them a client streams answers, and another sends a
short prompt every second. With --before the same load is put on a worker of an older checkout first. A stream's time
per token is compared with that beside one long client there: `slow_down`.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table, number
from benchmarks.load.served import worker_of
from benchmarks.load.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import GenerateRequest
from redraft.worker.client import WorkerClient

SHORT_TOKENS = 8
EVERY_S, SETTLE_S = 1.0, 2.0
"""Time between short prompts, and between the first long prompts and the first stream."""

console = Console()


@dataclass(frozen=True)
class Load:
    """What is sent: token ids of the long prompts, texts of the others, and how long the answers are."""

    long: list[list[int]]
    streamed: list[str]
    short: list[str]
    long_tokens: int
    stream_tokens: int


@dataclass
class Cell:
    """One load on one worker. Times to first token are those of the short prompts, in order."""

    worker: str
    clients: int
    ttft_s: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    """A stream's time per token after its first, one for each stream."""
    long_prompts: int = 0
    seconds: float = 0.0

    @property
    def stream_ms(self) -> float:
        """Time per token over all streams, which are equally long."""
        return sum(self.tpot_ms) / len(self.tpot_ms)


def measure(client: WorkerClient, worker: str, clients: int, load: Load) -> Cell:
    """Put the load on a worker."""
    cell, over = Cell(worker, clients), threading.Event()
    with ThreadPoolExecutor(clients + 1) as pool:
        started = time.perf_counter()
        sent = [
            pool.submit(_send_long, client, load.long[place:] + load.long[:place], load.long_tokens, cell, over)
            for place in range(clients)
        ]
        try:
            if clients:
                time.sleep(SETTLE_S)
            sent.append(pool.submit(_send_short, client, load.short, cell, over))
            for text in load.streamed:
                cell.tpot_ms.append(_stream(client, text, load.stream_tokens))
            cell.seconds = time.perf_counter() - started
        finally:
            over.set()
    for one in sent:
        one.result()
    return cell


def _stream(client: WorkerClient, text: str, tokens: int) -> float:
    """A stream's time per token after its first, in ms."""
    answer = client.complete(GenerateRequest(id=client.new_id(), text=text, max_tokens=tokens, end_id=-1, stream=True))
    assert answer.stats is not None
    return answer.stats.decode_ms / (tokens - 1)


def _send_long(
    client: WorkerClient, prompts: Sequence[list[int]], tokens: int, cell: Cell, over: threading.Event
) -> None:
    place = 0
    while not over.is_set():
        prompt = prompts[place % len(prompts)]
        client.complete(GenerateRequest(id=client.new_id(), input_ids=prompt, max_tokens=tokens, end_id=-1))
        place += 1
        if not over.is_set():
            cell.long_prompts += 1


def _send_short(client: WorkerClient, texts: Sequence[str], cell: Cell, over: threading.Event) -> None:
    place = 0
    while not over.is_set():
        started = time.perf_counter()
        request = GenerateRequest(
            id=client.new_id(), text=texts[place % len(texts)], max_tokens=SHORT_TOKENS, end_id=-1, stream=True
        )
        chunks = client.generate(request)
        next(chunks)
        cell.ttft_s.append(time.perf_counter() - started)
        for _ in chunks:
            pass
        place += 1
        over.wait(max(EVERY_S - (time.perf_counter() - started), 0))


def load_of(bundle: Path, dataset: Path, long_rows: int, long_tokens: int, streams: int, stream_tokens: int) -> Load:
    """The prompts of a data set: as they are, and joined to long ones, each with a beginning of its own."""
    tokenizer = ChatTokenizer(bundle)
    texts = [prompt.turns[0] for prompt in load_prompts(dataset)]
    chats = [tokenizer.chat(text) for text in texts]
    ids = tokenizer.encode("\n\n".join(texts))
    while len(ids) < 2 * long_rows:
        ids += ids
    starts = range(0, len(ids) - long_rows, max((len(ids) - long_rows) // 16, 1))
    return Load([ids[start : start + long_rows] for start in starts], spread(chats, streams),
                sorted(chats, key=len)[:16], long_tokens, stream_tokens)  # fmt: skip


def slow_downs(cells: Sequence[Cell]) -> list[float | None]:
    """Each cell's time per streamed token over that beside one long client on the first worker; None without such."""
    base = next((cell for cell in cells if cell.clients == 1), None)
    return [cell.stream_ms / base.stream_ms if base else None for cell in cells]


def table(cells: Sequence[Cell]) -> Table:
    """One row per load."""
    columns = ["worker, long clients", "TTFT s, median", "longest", "stream ms/token", "slow-down", "long prompts/s"]
    shown = Table("A short prompt and a running stream beside long prompts", columns)
    for cell, slower in zip(cells, slow_downs(cells), strict=True):
        figures = [median(cell.ttft_s), max(cell.ttft_s), cell.stream_ms, slower, cell.long_prompts / cell.seconds]
        shown.rows.append([f"{cell.worker}, {cell.clients}", *(number(figure, 2) for figure in figures)])
    return shown


def main(argv: list[str] | None = None) -> None:
    """Put every load on every worker, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("bundle", type=Path)
    add("--before", type=Path, help="an older checkout, whose worker is measured first")
    add("--clients", type=int, nargs="+", default=[0, 1, 8], help="clients that send long prompts")
    add("--long-prompt", type=int, default=2000, help="tokens of a long prompt")
    add("--long-answer", type=int, default=16, help="tokens of its answer")
    add("--streams", type=int, default=6, help="streams, one after the other")
    add("--stream-tokens", type=int, default=192)
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--threads", type=int)
    add("--output", type=Path, default=Path("docs/results/fairness.json"))
    args = parser.parse_args(argv)
    lengths = args.long_prompt, args.long_answer, args.streams, args.stream_tokens
    load = load_of(args.bundle, args.dataset, *lengths)
    cells: list[Cell] = []
    for worker, source in (("before", args.before), ("now", None)):
        if worker == "before" and source is None:
            continue
        with worker_of(args.bundle, args.threads, source) as client:
            for clients in args.clients:
                console.print(f"{worker}: {clients} long clients")
                cells.append(measure(client, worker, clients, load))
    table(cells).show(console)
    rows = [asdict(cell) | {"slow_down": slower} for cell, slower in zip(cells, slow_downs(cells), strict=True)]
    setting = {name: getattr(args, name) for name in ("long_prompt", "long_answer", "streams", "stream_tokens")}
    write_json(args.output, {"bundle": args.bundle.name, **setting, "cells": rows})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
