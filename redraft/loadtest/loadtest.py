"""Load test: streaming requests at fixed rates against a service or a bare engine worker.

    redraft loadtest --request-rate 0.5 1 2 --output out/spec

Writes one JSON file per rate and run and plots into the result folder and prints tables. With --baseline, compares with
the results in that folder: an earlier test's, or, with --baseline-url, those of a second server that takes turns with
the first, run by run, so that a busy moment of the machine hits both. Ctrl-C writes what there is.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from rich.console import Console

from redraft.bundle.machine import machine_name
from redraft.chat import ChatMessage
from redraft.console.progress import duration, progress, write
from redraft.errors import reason
from redraft.loadtest import plots
from redraft.loadtest.clients.base import Client, Generation, GenerationError
from redraft.loadtest.clients.connect import MODEL, address, connect
from redraft.loadtest.clients.worker import BareWorker
from redraft.loadtest.metrics import Timeline, acceptance, steady_window, summarize
from redraft.loadtest.options import Options, bundle_plan, check
from redraft.loadtest.results import Run, clear_runs, load_runs, rate_name, save_run, write_json
from redraft.loadtest.runner import hold, open_loop
from redraft.loadtest.saturation import Probe, Saturation, comparison, find, table
from redraft.loadtest.tables import run_tables, speedup_table
from redraft.loadtest.workload import ChatTokenizer, Conversation, arrival_times, conversations_of
from redraft.metrics import ACCEPTED_TOKENS, DRAFT_TOKENS, GENERATION_TOKENS, PREFIX, SEQUENCE_STEPS, Metric
from redraft.prompts import Prompt, load_prompts
from redraft.request import AUTO_REGRESSIVE

SETTING = (
    "num_prompts", "seconds", "ramp", "runs", "max_tokens", "temperature", "top_p", "top_k", "seed", "arrival",
    "burstiness", "max_concurrency", "multi_turn", "shared_prefix", "prompt_tokens",
)  # fmt: skip
BASELINE = "auto-regressive"
FIRST_TOKENS = 64
"""More than a service writes before it is ready."""
PROBED, COMPARISON = "saturation.json", "comparison.json"
console = Console()


@dataclass(frozen=True)
class Load:
    """What one run sends: conversations and the seconds at which they are due; without them, when there is a place."""

    conversations: list[Conversation]
    times: list[float] | None
    skipped: int
    """Prompts of the seed's order that other loads of this test take."""
    repeated: int
    """Conversations whose prompts this test had sent before."""

    @property
    def requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)


class LoadTest:
    """A load test of one server or of several that take turns; `args` are the flags of the one asked for.

    Raises ValueError where the prompts are not fit for the flags.
    """

    def __init__(self, args: Options, slo: dict[str, float]):
        self.args, self.slo = args, slo
        self.tokenizer = ChatTokenizer(args.folder)
        self.prompts: list[Prompt] = load_prompts(args.prompts, args.column, args.multi_turn)
        self.workload = (args.multi_turn, args.shared_prefix, args.prompt_tokens)
        self._sent: list[str] = []
        """The prompts of all loads so far, in the order of the seed: the next load takes those after them."""
        self.warm_ups, _ = self.others(max(args.warm_up, 1))
        self.loads = self.loads_of(args.request_rate)
        self.saturated: Saturation | None = None
        """Where the baseline saturates, once it was searched for"""

    def load(self, rate: float, run: int) -> Load:
        """What is sent in one run of a rate, the same for every server. Raises ValueError for flags out of range."""
        args, seed = self.args, self.args.seed + run - 1
        requests = self.requests(rate)
        skipped = len(self._sent)
        made, repeated = self.others(requests)
        if math.isinf(rate) and args.max_concurrency:
            return Load(made, None, skipped, repeated)
        starts = rate * len(made) / requests
        times = arrival_times(starts, len(made), args.arrival, args.burstiness, seed).tolist()
        return Load(made, times, skipped, repeated)

    def others(self, count: int) -> tuple[list[Conversation], int]:
        """The next conversations, with `count` turns together, and how many of their prompts were sent before: a server
        that drafts from what it served would know the answers, so none is sent twice while there are others."""
        made = conversations_of(
            self.prompts, count, self.args.seed, self.tokenizer, *self.workload, skip=len(self._sent)
        )
        before = len({*self._sent})
        self._sent += [item.question_id for item in made]
        return made, len(made) - (len({*self._sent}) - before)

    def loads_of(self, rates: Sequence[float]) -> dict[tuple[float, int], Load]:
        """What is sent, by rate and run: built before the first run, so that no prompt ends a test that has begun.

        Raises ValueError where the prompts are not fit for the flags.
        """
        return {(rate, run): self.load(rate, run) for rate in rates for run in range(1, self.args.runs + 1)}

    def requests(self, rate: float) -> int:
        """Requests of one run of a rate: those of its ramp, then of at least --num-prompts and --seconds."""
        if math.isinf(rate):
            return self.args.num_prompts
        return math.ceil(rate * self.args.ramp) + max(self.args.num_prompts, math.ceil(rate * self.args.seconds))

    def say_plan(self, servers: int) -> None:
        """Write what is sent, and how long that takes at least: a slower server's answers take longer."""
        args = self.args
        for rate in args.request_rate:
            count = self.requests(rate)
            sending = args.runs * servers * (0 if math.isinf(rate) else count / rate)
            write(
                console,
                f"{rate_name(rate)} requests/s: {count} requests of at most {args.max_tokens} tokens, {args.runs} times"
                f"{f' at each of {servers} servers' if servers > 1 else ''}: at least {duration(sending)}",
            )

    def writer(self, contender: Options) -> Any:
        """How a contender's requests are written: see `runner.Write`."""
        sampling = {name: getattr(contender, name) for name in ("temperature", "top_p", "top_k")}
        sampling = {name: value for name, value in sampling.items() if value is not None}

        def request(conversation: Conversation, messages: Sequence[ChatMessage]) -> Generation:
            plain = not contender.chat
            return Generation(
                messages[-1]["content"] if plain else self.tokenizer.write(messages),
                contender.max_tokens,
                {**sampling, "seed": conversation.seed},
                method=contender.method,
                add_special_tokens=plain or self.tokenizer.adds_special_tokens,
                messages=() if plain or self.tokenizer.template is None else tuple(messages),
            )

        return request

    async def warm_up(self, contender: Options, client: Client, count: int, advance: Any) -> None:
        """Send a few requests that do not count. Raises GenerationError where one fails."""
        for conversation in self.warm_ups[:count]:
            done: list[Timeline] = []
            await hold(client, conversation, time.perf_counter(), self.writer(contender), self.tokenizer, done.append)
            if done[0].error is not None:
                raise GenerationError(f"{contender.label}: the warm-up request failed: {done[0].error}")
            advance()

    async def run(
        self, contender: Options, client: Client, rate: float, number: int, load: Load, name: str
    ) -> tuple[Run, list[Timeline]]:
        """One run of a rate: send and measure."""
        before = await client.counters()
        cpu, wall = time.process_time(), time.perf_counter()
        with progress(name, load.requests, "answers", console=console) as bar:
            tokens = errors = 0

            def advance(timeline: Timeline) -> None:
                nonlocal tokens, errors
                tokens, errors = tokens + timeline.output_tokens, errors + (timeline.error is not None)
                bar.update(bar.done + 1, f"{tokens} tokens" + (f", {errors} errors" if errors else ""))

            timelines, whole = await open_loop(
                client, load.conversations, load.times, self.writer(contender), self.tokenizer,
                contender.max_concurrency, advance,
            )  # fmt: skip
        cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
        window = steady_window(timelines, contender.ramp)
        summary = summarize(timelines, self.slo) | {"generator_cores": cores}
        summary |= acceptance_between(before, await client.counters())
        summary["steady"] = summarize(timelines, self.slo, window) if window else None
        server = contender.worker or f"{address(contender.protocol, contender.url)}/{contender.model_name or MODEL}"
        setting: dict[str, Any] = {"server": server, "protocol": "worker" if contender.worker else contender.protocol}
        setting |= {"plan": contender.plan, "dataset": contender.prompts.name}
        setting |= {"skipped_prompts": load.skipped, "repeated_prompts": load.repeated}
        setting |= {"served_before": contender.served_before}
        setting |= {"client": machine_name(), "date": f"{date.today():%Y-%m-%d}"}
        setting |= {name: getattr(contender, name) for name in SETTING}
        return Run(contender.label, rate, setting, summary, not whole, number), timelines

    async def saturation(self, contender: Options, client: Client) -> Saturation:
        """Search for a contender's saturation, with a line per probe, and write it into its result folder."""

        async def probe(rate: float) -> Probe:
            run, _ = await self.run(contender, client, rate, 1, self.load(rate, 1), f"{contender.label}: search")
            if run.interrupted:
                raise KeyboardInterrupt
            figures = run.figures
            due, completed = figures["requests_due_per_s"], figures["request_throughput"]
            result = Probe(rate, due, completed, run.summary["errors"])
            write(console, f"{contender.label}: {result}")
            return result

        result = await find(probe, self.args.request_rate[0])
        setting = {name: getattr(contender, name) for name in ("method", "protocol", *SETTING)}
        content = {
            "label": contender.label,
            **result.to_json(),
            "setting": setting | {"dataset": contender.prompts.name},
        }
        write_json(contender.results / PROBED, content)
        write(
            console,
            f"{contender.label}: saturation: {result.throughput:.3g} requests/s are completed at most; "
            f"the highest rate that was followed is {result.followed:.3g}",
        )
        return result

    async def measure(self) -> list[Run]:
        """Warm up, then every rate in turn, at each contender. The runs of the server asked for; none of a search.

        Raises GenerationError when a warm-up request fails, OSError for a result folder that cannot be written.
        """
        args, compared = self.args, contenders(self.args)
        warmup = max(args.warm_up, 1)
        for contender in compared:
            contender.results.mkdir(parents=True, exist_ok=True)
        runs: list[Run] = []
        async with AsyncExitStack() as stack:
            servers = []
            with progress("warm-up", warmup * len(compared), "answers", "connecting", console) as bar:
                for contender in compared:
                    client = await client_of(contender)
                    stack.push_async_callback(client.close)
                    servers.append((contender, client))
                    contender.served_before = _count(await client.counters(), GENERATION_TOKENS) > FIRST_TOKENS
                for contender, client in servers:  # which may be one service
                    await self.warm_up(contender, client, warmup, lambda: bar.update(bar.done + 1, ""))
            for contender, _ in servers:
                clear_runs(contender.results)
            if args.find_saturation:
                for server in servers:
                    await self.saturation(*server)
                return []
            if args.of_saturation:
                self.saturated = await self.saturation(*servers[0])
                args.request_rate = [float(f"{share * self.saturated.throughput:.3g}") for share in args.of_saturation]
                self.loads = self.loads_of(args.request_rate)
            self.say_plan(len(servers))
            for rate in args.request_rate:
                for number in range(1, args.runs + 1):
                    load = self.loads[rate, number]
                    for contender, client in servers if number % 2 else reversed(servers):
                        name = f"{contender.label} at {rate_name(rate)} requests/s, run {number} of {args.runs}"
                        run, timelines = await self.run(contender, client, rate, number, load, name)
                        save_run(contender.results, run, timelines)
                        if contender is args:
                            runs.append(run)
                        if run.interrupted:
                            console.print("[yellow]interrupted: what had ended is written")
                            return runs
        return runs


async def client_of(args: Options) -> Client:
    """The server or the worker, as the flags say. Raises GenerationError where none answers."""
    if args.worker:
        return BareWorker(args.worker)
    return await connect(args.protocol, args.url, args.model_name, args.metrics_url or None)


def acceptance_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Acceptance figures of the steps between two readings of the server's counters."""
    counted = (SEQUENCE_STEPS, DRAFT_TOKENS, ACCEPTED_TOKENS)
    changes = [_count(after, metric) - _count(before, metric) for metric in counted]
    return acceptance(*changes)


def _count(counters: dict[str, float], metric: Metric[Any]) -> float:
    return counters.get(metric.series.removeprefix(PREFIX), 0.0)


def contenders(args: Options) -> list[Options]:
    """The servers to measure, each as the flags of a run of its own: the one asked for last."""
    args.plan = bundle_plan(args.folder, args.method)
    if not args.baseline_url:
        return [args]
    server: dict[str, Any] = {"url": args.baseline_url, "metrics_url": args.baseline_metrics_url, "worker": None}
    server |= {"method": AUTO_REGRESSIVE, "label": BASELINE, "output": args.baseline}
    baseline = replace(args, **server)
    baseline.plan = {}
    return [baseline, args]


def show(args: Options, runs: list[Run], saturated: Saturation | None) -> None:
    """Print the tables and draw the plots. Raises ValueError for a baseline that sent something else."""
    for entry in run_tables(runs, args.metrics):
        entry.show(console)
    plots.load_test([runs], args.results)
    if args.baseline:
        baseline = load_runs(args.baseline)
        speedup_table(baseline, [runs]).show(console)
        if saturated:
            report = comparison(baseline, runs, saturated)
            write_json(args.results / COMPARISON, report)
            table(report).show(console)
        plots.load_test([baseline, runs], args.results)


def run_load_test(args: Options) -> int:
    """Run a load test; the exit status is 130 after Ctrl-C, and 1 when a request failed, except beyond saturation,
    where a service may refuse some."""
    try:
        slo = check(args)
        if args.baseline and not args.baseline_url:
            load_runs(args.baseline)  # what it lacks is said before the test, not after it
        test = LoadTest(args, slo)
        runs = asyncio.run(test.measure())
        if args.find_saturation:
            console.print(f"written to {args.results}")
            return 0
        if not runs:
            return 130
        show(args, runs, test.saturated)
    except (ValueError, OSError, GenerationError) as error:
        print(f"redraft loadtest: {reason(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("redraft loadtest: interrupted", file=sys.stderr)
        return 130
    for run in runs:
        for message, count in run.summary["error_messages"].items():
            console.print(f"[red]{rate_name(run.request_rate)} requests/s: {count} failed: {message}")
    console.print(f"written to {args.results}")
    if runs[-1].interrupted:
        return 130
    return int(any(run.summary["errors"] for run in runs) and not args.of_saturation)
