"""What keeping a chat at one replica is worth, simulated on several machines.

    python -m studies.speed.replicas

Users chat without end: a first question, then follow-ups over all that was said, each after a pause. Each machine is
one replica with the scheduler's slots, chunks and order of prompts (docs/guides/scheduling.md), and takes the time of a
step from measured ones. The proxy sends a chat's turns to the machine of its hash, or each request to the next machine.

Assumptions:

- Nothing is drafted, and turns have the lengths that `Chats` says.
- A step's time is that of its rows, on straight lines through the measured ones and beyond them on the last line,
  whatever is in the cache: contexts are short.
- A slot keeps its last chat's tokens until another chat needs it, the least recently used first.
- Networks, proxy and tokenizers take no time.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import Report, run
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table

CHUNK = 128
"""Prompt rows of a step; half of it while others decode."""


@dataclass(frozen=True)
class Chats:
    """Lengths in tokens, and pauses in seconds, of `users` for each machine."""

    users: int = 12
    turns: int = 5
    question: int = 60
    answer: int = 120
    pause_s: float = 5.0


class StepTimes:
    """Milliseconds of a step by its rows, from a file of `benchmarks.speed.step_times`."""

    def __init__(self, measured: list[dict[str, Any]]):
        points = sorted((entry["rows"], entry["median_ms"]) for entry in measured if "median_ms" in entry)
        self._rows, self._ms = map(np.array, zip(*points, strict=True))
        self._slope = (self._ms[-1] - self._ms[-2]) / (self._rows[-1] - self._rows[-2])

    def __call__(self, rows: int) -> float:
        """The time of a step by its rows."""
        return float(np.interp(rows, self._rows, self._ms) + max(0, rows - self._rows[-1]) * self._slope)


@dataclass
class Request:
    """A turn of a chat: `prompt` tokens, of which `done` are in the cache, and `answered` tokens of its answer."""

    chat: int
    prompt: int
    arrived: float
    done: int = 0
    answered: int = 0


@dataclass
class Machine:
    """One replica."""

    slots: int
    cached: dict[int, int] = field(default_factory=dict)
    """Tokens that free slots keep by chat, the least recently used first."""
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)

    def admit(self) -> int:
        """Give slots to those who wait. Returns the tokens that they found in the cache."""
        hits = 0
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            request.done = min(self.cached.pop(request.chat, 0), request.prompt - 1)
            hits += request.done
            self.running.append(request)
            while len(self.cached) + len(self.running) > self.slots:
                del self.cached[next(iter(self.cached))]
        return hits

    def step(self, answer: int) -> tuple[int, int, list[Request], list[Request]]:
        """Rows that decode and rows of prompts of the next step; requests whose first token it gives, and those that it
        ends."""
        decoding = [request for request in self.running if request.done == request.prompt]
        left = CHUNK // 2 if decoding else CHUNK
        prompts, first = 0, []
        for request in sorted(self.running, key=lambda request: request.prompt - request.done):
            rows = min(left, request.prompt - request.done)
            request.done, left, prompts = request.done + rows, left - rows, prompts + rows
            if rows and request.done == request.prompt:
                first.append(request)
        for request in [*decoding, *first]:
            request.answered += 1
        ended = [request for request in self.running if request.answered == answer]
        for request in ended:
            self.running.remove(request)
            self.cached[request.chat] = request.prompt + answer
        return len(decoding), prompts, first, ended


@dataclass(frozen=True)
class Result:
    """What one simulation gave after its first fifth; `hit_rate` is the share of prompt tokens found in the cache."""

    machines: int
    proxy: str
    hit_rate: float
    prompt_rows_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float


def simulate(machines: int, affinity: bool, slots: int, times: StepTimes, chats: Chats, seconds: float) -> Result:
    """Simulate `machines` replicas for `seconds`."""
    draws = np.random.default_rng(0)
    replicas = [Machine(slots) for _ in range(machines)]
    busy = [False] * machines
    # Events in the order of time: a request that arrives (chat, turn), or a machine whose step has ended.
    events: list[tuple[float, int, int, tuple[int, int] | None]] = []
    turns: dict[int, int] = {}
    names, next_machine, order = iter(range(1 << 60)), 0, iter(range(1 << 60))
    # What the step under way of each machine gives when it ends: first tokens, and answers that are whole.
    after: dict[int, tuple[list[Request], list[Request]]] = {}
    begin = seconds / 5
    ttft: list[float] = []
    prompt_tokens = hits = prompt_rows = tokens = 0

    def arrive(when: float, chat: int, turn: int) -> None:
        heapq.heappush(events, (when, next(order), -1, (chat, turn)))

    def start(machine: int, now: float) -> None:
        nonlocal hits, prompt_rows, tokens, prompt_tokens
        replica = replicas[machine]
        waiting = [*replica.waiting]
        found = replica.admit()
        busy[machine] = bool(replica.running)
        if not replica.running:
            return
        decoding, prompts, first, ended = replica.step(chats.answer)
        after[machine] = first, ended
        if now >= begin:
            prompt_tokens += sum(request.prompt for request in waiting[: len(waiting) - len(replica.waiting)])
            hits, prompt_rows, tokens = hits + found, prompt_rows + prompts, tokens + decoding + len(first)
        heapq.heappush(events, (now + times(decoding + prompts) / 1e3, next(order), machine, None))

    for _ in range(chats.users * machines):
        arrive(draws.exponential(chats.pause_s), next(names), 0)
    while events and events[0][0] < seconds:
        now, _, machine, arrival = heapq.heappop(events)
        if arrival is not None:
            chat, turn = arrival
            turns[chat] = turn
            if affinity:
                machine = Random(chat).randrange(machines)  # instead of the proxy's hash
            else:
                machine, next_machine = next_machine, (next_machine + 1) % machines
            prompt = chats.question + turn * (chats.question + chats.answer)
            replicas[machine].waiting.append(Request(chat, prompt, now))
            if not busy[machine]:
                start(machine, now)
            continue
        first, ended = after[machine]
        ttft += [now - request.arrived for request in first if request.arrived >= begin]
        for request in ended:
            turn = turns.pop(request.chat) + 1
            goes_on = turn < chats.turns
            pause = draws.exponential(chats.pause_s)
            arrive(now + pause, request.chat if goes_on else next(names), turn if goes_on else 0)
        start(machine, now)
    span = seconds - begin
    p50, p95 = np.percentile(ttft, [50, 95]) * 1e3
    proxy = "chat" if affinity else "in turn"
    return Result(machines, proxy, hits / prompt_tokens, prompt_rows / span, tokens / span, float(p50), float(p95))


def table(results: list[Result]) -> Table:
    """The figures."""
    columns = ["machines", "sent by", "hit rate", "prompt rows/s", "tokens/s", "TTFT p50 ms", "TTFT p95 ms"]
    shown = Table("Replicas", columns)
    for one in results:
        figures = [f"{one.hit_rate:.0%}", f"{one.prompt_rows_per_s:.0f}", f"{one.tokens_per_s:.0f}"]
        times = [f"{one.ttft_p50_ms:.0f}", f"{one.ttft_p95_ms:.0f}"]
        shown.rows.append([str(one.machines), one.proxy, *figures, *times])
    return shown


def every(machines: list[int], *arguments: Any) -> Iterator[Result]:
    """Both proxies for each number of machines; with one machine they are the same."""
    for count in machines:
        for affinity in (True, False)[: 1 if count == 1 else 2]:
            yield simulate(count, affinity, *arguments)


def main(
    step_times: Annotated[Path, typer.Option(metavar="FILE", help="Measured times of a replica's steps.")] = Path(
        "docs/results/zen4/step_times.json"
    ),
    machines: Annotated[list[int], typer.Option(help="Numbers of machines, a simulation for each.")] = [1, 2, 4, 8],
    users: Annotated[int, typer.Option(min=1, help="Users for each machine.")] = Chats.users,
    slots: Annotated[int, typer.Option(min=1, help="Slots of a replica.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated seconds.")] = 600.0,
    output: Report = Path("artifacts/reports/replicas.json"),
) -> None:
    measured = json.loads(step_times.read_text())
    chats = Chats(users=users)
    results = list(every(machines, slots, StepTimes(measured["rows"]), chats, seconds))
    report = {
        "steps": f"{measured['machine']}, {measured['date']}",
        "slots": slots,
        "seconds": seconds,
        "chats": asdict(chats),
    }
    finish(output, report | {"rows": [asdict(one) for one in results]}, table(results))


if __name__ == "__main__":
    run(main)
