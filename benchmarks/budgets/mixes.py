"""Mixes of requests by budgets that choose themselves, beside plain decoding and budgets that never change: live, and
simulated.

    python -m benchmarks.budgets.mixes --bundle BUNDLE
    python -m benchmarks.budgets.mixes --bundle BUNDLE --prompts mt_bench.jsonl --fixed 4 8 15 --record mixes.json

Five mixes: chats, greedy and at temperature 1; code edits; random words at a high temperature, which nothing predicts;
and a ramp from 1 to 16 to 1 streams that changes in the middle from edits to random words. First each text is recorded
with what the bundle drafts at each token. Then a mix is served in turns of a request, or of as many as the ramp has
streams, and each way of decoding serves a turn before the next begins, the last first in every second turn, so that a
busy machine slows all alike. Budgets that choose themselves begin each mix as on a new server. The same turns are then
replayed on a virtual clock, on a machine that is as the budgets have learned this one.

Figures are speed-ups over plain decoding in the same engine, the first 20 steps left out: of all tokens, with an
interval of 95% over turns; and in the worst window of 10 seconds, in which plain decoding takes what it took for these
tokens. The first turn's has all its steps. The regret is what the budgets fall short of the best fixed budget, 0
included. Plain decoding serves each turn a second time, as a control: where its figures are not 1, the machine is why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.budgets.recorded import Replay, Text, record
from benchmarks.budgets.simulation import WARM_UP_STEPS, LearnedMachine, Run, simulate, simulate_fixed
from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, PromptsFile, Report, console, run
from benchmarks.speed.inprocess import load_llm, require_fit, write_caches
from redraft.budgets.controller import BudgetController
from redraft.bundle.budget_table import BudgetTable
from redraft.console.progress import tracked
from redraft.loadtest.intervals import interval, ratio
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.runtime import Runtime, first_estimates

EDITS_FILE = Path(__file__).with_name("edits.jsonl")
PLAIN, CHOSEN, AGAIN = "plain", "chosen", "plain again"
RANDOM_TEMPERATURE, RANDOM_WORDS = 1.5, 40


class Turn(NamedTuple):
    """Requests of one kind that are served at once, from the index `first` on."""

    kind: str
    first: int
    streams: int

    def of(self, items: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Those of the kind's, which begin anew after the last."""
        kind = items[self.kind]
        return [kind[(self.first + index) % len(kind)] for index in range(self.streams)]


def mixes(turns: int) -> dict[str, list[Turn]]:
    """The five mixes, of `turns` turns each, the ramp of as many as it has steps."""
    result = {
        name: [Turn(kind, first, 1) for first in range(turns)]
        for name, kind in (
            ("chats, greedy", "chats"),
            ("chats, temperature 1", "sampled"),
            ("code edits", "edits"),
            ("random words", "random"),
        )
    }
    up = (1, 2, 4, 8, 16)
    ramp = [("edits", streams) for streams in up] + [("random", streams) for streams in reversed(up)]
    return result | {"ramp": [Turn(kind, 0, streams) for kind, streams in ramp]}


def requests_of(bundle: Path, prompts: Path, count: int, max_tokens: int) -> dict[str, list[GenerateRequest]]:
    """Requests by kind."""
    tokenizer, rng = ChatTokenizer(bundle), np.random.default_rng(0)
    chats = [prompt.turns[0] for prompt in spread(load_prompts(prompts), count)]
    edits = [prompt.turns[0] for prompt in spread(load_prompts(EDITS_FILE), count)]
    words = sorted({word.strip(".,?!:;\"'()").lower() for text in chats for word in text.split()})
    lists = [", ".join(rng.permutation(words)[:RANDOM_WORDS]) for _ in range(count)]
    asked = {
        "chats": (chats, 0.0),
        "sampled": (chats, 1.0),
        "edits": (edits, 0.0),
        "random": ([f"Go on with these random words: {words}" for words in lists], RANDOM_TEMPERATURE),
    }
    return {
        kind: [
            tokenizer.request(text, max_tokens, seed=seed, temperature=temperature) for seed, text in enumerate(texts)
        ]
        for kind, (texts, temperature) in asked.items()
    }


@dataclass
class Decoding:
    """What one way of decoding took for a mix, step by step."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    """Steps up to the end of each turn."""
    texts: list[list[int]] = field(default_factory=list)

    def serve(self, runtime: Runtime, requests: Sequence[GenerateRequest], method: str | None) -> None:
        """Serve a turn's requests at once."""
        scheduler = runtime.scheduler
        sequences = [
            runtime.sequence(key, request.model_copy(update={"method": method})) for key, request in enumerate(requests)
        ]
        texts: list[list[int]] = [[] for _ in sequences]
        for sequence in sequences:
            scheduler.submit(sequence)
        gained = 0
        while not scheduler.idle:
            started = time.perf_counter()
            outputs = scheduler.step()
            self.seconds.append(time.perf_counter() - started)
            for output in outputs:
                texts[output.key] += output.token_ids  # type: ignore[call-overload]
            before, gained = gained, sum(sequence.stats.output_tokens for sequence in sequences)
            self.tokens.append(gained - before)
        self.texts += texts
        self.turn_ends.append(len(self.seconds))

    def beside(self, plain: Decoding) -> Run:
        """The run, with what plain decoding took for the same tokens."""
        reached = np.interp(np.cumsum(self.tokens), np.cumsum(plain.tokens), np.cumsum(plain.seconds))
        return Run(np.array(self.seconds), np.diff(reached, prepend=0.0))

    def turns(self, run: Run) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of plain decoding and of the run by turn, the first steps left out."""
        starts = [max(start, WARM_UP_STEPS) for start in (0, *self.turn_ends[:-1])]
        pairs = [
            (run.plain[start:end].sum(), run.seconds[start:end].sum())
            for start, end in zip(starts, self.turn_ends, strict=True)
            if start < end
        ]
        if not pairs:
            raise typer.BadParameter(f"a mix ended within {WARM_UP_STEPS} steps: ask for more --turns or --max-tokens")
        plain, seconds = np.array(pairs).T
        return plain, seconds

    def interval(self, run: Run) -> list[float]:
        """The interval of 95% of the run's speed-up, over turns."""
        return list(interval(ratio(*self.turns(run))))


def serve_by(runtime: Runtime, budgets: BudgetController | None, nodes: int = 0) -> None:
    """Let the runtime draft by these budgets, or else `nodes` nodes for each sequence, whatever pays."""
    runtime.budgets = budgets
    methods = runtime.methods
    if budgets is None:
        constant = BudgetTable.constant(nodes)
        methods = {name: method.changed(budget=constant) for name, method in methods.items()}
    runtime.with_methods(methods)


@dataclass
class Ways:
    """The ways of decoding that are compared, on one engine."""

    runtime: Runtime
    fixed: list[int]

    def __post_init__(self) -> None:
        self.first = first_estimates(self.runtime.engine, self.runtime.limits, self.runtime.methods)

    def start(self) -> BudgetController:
        """A controller that has learned nothing: it knows what is timed at load, and what training measured."""
        return BudgetController(self.first.model_copy(deep=True))

    def live(self, turns: Sequence[Sequence[GenerateRequest]], budgets: BudgetController) -> dict[str, Any]:
        """Serve a mix in every way. Returns its figures."""
        served: dict[str, Decoding] = {name: Decoding() for name in (PLAIN, CHOSEN, AGAIN, *map(str, self.fixed))}
        for index, requests in enumerate(turns):
            ways = list(served.items())
            for name, decoding in reversed(ways) if index % 2 else ways:
                serve_by(self.runtime, budgets if name == CHOSEN else None, int(name) if name.isdigit() else 0)
                decoding.serve(self.runtime, requests, AUTO_REGRESSIVE if name in (PLAIN, AGAIN) else None)
        plain = served.pop(PLAIN)
        figures: dict[str, Any] = {"plain_tokens_per_s": sum(plain.tokens) / sum(plain.seconds)}
        figures |= {"identical": all(decoding.texts == plain.texts for decoding in served.values())}
        first, plain_first = (sum(part.seconds[: part.turn_ends[0]]) for part in (served[CHOSEN], plain))
        figures |= {"first_turn": plain_first / first}
        runs = {name: decoding.beside(plain) for name, decoding in served.items()}
        control = runs.pop(AGAIN)
        figures |= {
            "interval": served[CHOSEN].interval(runs[CHOSEN]),
            "control": {
                "speed_up": control.speed_up,
                "interval": served[AGAIN].interval(control),
                "worst_window": control.worst_window,
            },
        }
        return figures | compared(runs)

    def simulated(self, turns: Sequence[Sequence[Text]], budgets: BudgetController) -> dict[str, Any]:
        """Replay a mix in every way on a machine that is as these budgets know this one."""
        method = next(iter(self.runtime.methods))
        machine = LearnedMachine(self.first.costs.tables[0], budgets.costs, method)
        runs = {CHOSEN: simulate(machine, Replay(turns), calibration=self.first.calibrations.get(method))}
        return compared(runs | {str(nodes): simulate_fixed(machine, Replay(turns), nodes) for nodes in self.fixed})


def compared(runs: Mapping[str, Run]) -> dict[str, Any]:
    """The figures of the budgets that choose themselves beside those of fixed ones."""
    fixed = {name: run.speed_up for name, run in runs.items() if name != CHOSEN}
    best = max(("0", *fixed), key=lambda nodes: fixed.get(nodes, 1.0))
    chosen = runs[CHOSEN]
    return {
        "speed_up": chosen.speed_up,
        "worst_window": chosen.worst_window,
        "fixed": fixed,
        "best": best,
        "regret": 1 - chosen.speed_up / fixed.get(best, 1.0),
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A mix a row."""
    columns = ["mix", "plain, tokens/s", "first turn", AGAIN, f"{AGAIN}, worst 10 s"]
    for kind in ("live", "simulated"):
        columns += [kind, f"{kind}, worst 10 s", f"{kind}, best fixed (nodes)", f"{kind}, regret"]
    result = Table("Budgets that choose themselves, over plain decoding", columns)
    for mix, figures in results.items():
        row = [mix, f"{figures['live']['plain_tokens_per_s']:.1f}", f"{figures['live']['first_turn']:.2f}x"]
        row += _speed_up(figures["live"]["control"])
        for kind in ("live", "simulated"):
            part = figures[kind]
            best = part["fixed"].get(part["best"], 1.0)
            row += _speed_up(part)
            row += [f"{best:.2f}x ({part['best']})", f"{part['regret']:+.1%}"]
        result.rows.append(row)
    return result


def _speed_up(figures: Mapping[str, Any]) -> list[str]:
    """A speed-up with its interval, if it has one, and that of the worst window."""
    within = " ({:.2f} to {:.2f})".format(*figures["interval"]) if "interval" in figures else ""
    worst = figures["worst_window"]
    return [f"{figures['speed_up']:.2f}x{within}", "-" if worst is None else f"{worst:.2f}x"]


def main(
    bundle: BundleFolder,
    prompts: PromptsFile = PROMPTS_FILE,
    requests: Annotated[int, typer.Option(min=1, help="Different requests of each kind.")] = 12,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each mix but the ramp.")] = 12,
    max_tokens: MaxTokens = 128,
    fixed: Annotated[list[int], typer.Option(min=1, help="Budgets that never change, in nodes.")] = [4, 8, 15],
    recording: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Write the recorded texts to this file, for tests; default: none."
        ),
    ] = None,
    output: Report = Path("artifacts/reports/budget_mixes.json"),
) -> None:
    llm = load_llm(bundle)
    if llm.runtime.budgets is None:
        raise typer.BadParameter(f"{bundle} drafts nothing")
    write_caches(llm)
    asked = requests_of(bundle, prompts, requests, max_tokens)
    for kind in asked.values():
        require_fit(llm, kind, prompts)
    texts = {
        kind: record(llm.runtime, chosen) for kind, chosen in tracked([*asked.items()], "recording", "kinds", console)
    }
    if recording:
        write_texts(recording, texts)
    ways = Ways(llm.runtime, fixed)
    results = {}
    for name, mix in tracked([*mixes(turns).items()], "serving", "mixes", console):
        budgets = ways.start()
        live = ways.live([turn.of(asked) for turn in mix], budgets)
        results[name] = {"live": live, "simulated": ways.simulated([turn.of(texts) for turn in mix], budgets)}
    llm.close()
    report = {"bundle": bundle.name, "requests": requests, "turns": turns, "max_tokens": max_tokens}
    finish(output, report | {"mixes": results}, table(results))


def write_texts(path: Path, texts: Mapping[str, Sequence[Text]]) -> None:
    """Write recorded texts by kind, a line each."""
    kinds = (
        f'"{kind}": [\n' + ",\n".join(json.dumps(text.written()) for text in recorded) + "\n]"
        for kind, recorded in texts.items()
    )
    path.write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8")


def read_texts(path: Path) -> dict[str, list[Text]]:
    """Inverse of `write_texts`."""
    return {kind: [Text.read(entry) for entry in texts] for kind, texts in json.loads(path.read_text()).items()}


if __name__ == "__main__":
    run(main)
