"""Where drafting's time goes: token by token against Lyanna's one pass (Lyanna, figure 13).

    python -m studies.speed.drafting_latency heads
    python -m studies.speed.drafting_latency untrained --model MODEL --output artifacts/drafters/untrained
    redraft build --model MODEL --methods artifacts/drafters/untrained/methods.toml --output BUNDLE
    python -m studies.speed.drafting_latency drafters --bundle BUNDLE
    python -m studies.speed.drafting_latency rejection --bundle BUNDLE --dataset PROMPTS

`heads` times the CPU operators that turn hidden states into drafted tokens: the LM head, softmax and sampling. Token by
token, each level's nodes go through the head; in one pass, the chain does so once, and each level adds what its nodes'
tokens say. `drafters` times the whole drafting networks of a bundle's methods; weights do not matter, so `untrained`
writes drafters and the methods that compare them: with the hot head, with the full one, and with hardly any. What the
first two take beyond the last is head, softmax and sampling; the rest is the layers. `rejection` times the host's
verification of drafts that were drawn at random, with several sequences at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer
from redraft.batch import DraftBatch
from redraft.bundle.manifest import Bundle
from redraft.decoding.verification import Verdict
from redraft.engines import load_engine
from redraft.errors import BundleError
from redraft.llm import LLM
from redraft.model_defs.drafters.eagle import EagleDrafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.plugins import kernels
from redraft.plugins.operators.linear.pack import DTYPES, pack
from redraft.prompts import load_prompts, spread
from redraft.request import GenerateRequest, request

LEVELS = 5
HOT, INFO = 12288, 8192
CACHE_BYTES = 256 << 20
METHODS = "methods.toml"
HEAD, SAMPLING, FUSED, ALL = "LM head", "softmax and sampling", "both in one operator", "all"
SHOWN = (HEAD, SAMPLING, FUSED, ALL)
console = Console()
app = typer.Typer(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), no_args_is_help=True, rich_markup_mode=None)


class Head:
    """Random weights of a head over `columns` tokens, hidden states, and an int8 table of token info."""

    def __init__(self, columns: int, hidden: int, dtype: str, width: int, k: int):
        """Trees have up to `width` nodes a level, with `k` children each."""
        rng = np.random.default_rng(0)
        self.columns, self.dtype, self.k = columns, dtype, k
        self.nodes = [1, *[width] * (LEVELS - 1)]
        self.weight = pack(rng.standard_normal((columns, hidden), dtype=np.float32) * hidden**-0.5, dtype)
        self.states = rng.standard_normal((max(width, LEVELS), hidden), dtype=np.float32)
        self.ids = np.arange(columns, dtype=np.int32)
        info = min(INFO, columns)
        rows = rng.integers(-127, 128, (info + 1, info), dtype=np.int8)
        self.table = np.minimum(self.ids, info), rows, np.full((info + 1, 1), 0.01, np.float32)

    def iterative(self) -> list[str]:
        """What a token-auto-regressive drafter computes, level by level; names what each operator is for."""
        for nodes in self.nodes:
            self._sample(self._project(nodes), np.arange(nodes, dtype=np.int32))
        return [HEAD, SAMPLING] * LEVELS

    def one_pass(self) -> list[str]:
        """What a hidden-state drafter computes."""
        logits = self._project(LEVELS)
        for level, nodes in enumerate(self.nodes):
            self._sample(logits, np.zeros(nodes, np.int32), *self.table, level=level, levels=LEVELS)
        return [HEAD, *[SAMPLING] * LEVELS]

    def fused(self) -> list[str]:
        """What our token-auto-regressive drafters run: a level's head, softmax and sampling as one operator."""
        for nodes in self.nodes:
            kernels.linear_topk(self.states[:nodes], self.weight, self.columns, self.dtype, self.k)
        return [FUSED] * LEVELS

    def _project(self, rows: int) -> np.ndarray:
        return kernels.linear(self.states[:rows], self.weight, self.columns, self.dtype)

    def _sample(
        self, logits: np.ndarray, rows: np.ndarray, *table: np.ndarray, level: int = 0, levels: int = 1
    ) -> None:
        tokens = np.arange(len(rows), dtype=np.int32) * 3
        kernels.token_info_topk(logits, rows, tokens, self.ids, *table, k=self.k, level=level, levels=levels)


WAYS: dict[str, Callable[[Head], list[str]]] = {
    "token by token": Head.iterative,
    "token by token, fused": Head.fused,
    "one pass": Head.one_pass,
}


def milliseconds(head: Head, way: Callable[[Head], list[str]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each part of a draft, and of all. Caches hold something else before each draft, as they do
    after a forward of the target."""
    with kernels.Recording() as recording:
        parts = way(head)
    other = np.zeros(CACHE_BYTES // 8)
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        other += 1
        spent = dict.fromkeys(parts, 0.0)
        for part, (function, arguments) in zip(parts, recording.calls, strict=True):
            started = time.perf_counter()
            function(*arguments)
            spent[part] += 1e3 * (time.perf_counter() - started)
        for part, value in {**spent, ALL: sum(spent.values())}.items():
            samples.setdefault(part, []).append(value)
    return {part: float(np.median(values)) for part, values in samples.items()}


@app.command()
def heads(
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 576,
    columns: Annotated[list[int], typer.Option(help="Tokens of the head.")] = [HOT, 49152],
    widths: Annotated[list[int], typer.Option(help="Nodes of a level.")] = [1, 4],
    k: Annotated[int, typer.Option(help="Children of a node.")] = 8,
    dtype: Annotated[str, typer.Option(help=f"Weights: {', '.join(DTYPES)}; drafters of bf16 bundles: w8a8.")] = "w8a8",
    repeats: Annotated[int, typer.Option(help="Drafts of each kind.")] = 30,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("docs/results/drafting_heads.json"),
) -> None:
    """Time LM head, softmax and sampling of drafts of 5 levels at batch 1, token by token and in one pass."""
    results = []
    for count in columns:
        for width in widths:
            head = Head(count, hidden, dtype, width, k)
            for name, way in WAYS.items():
                times = milliseconds(head, way, repeats)
                results.append({"columns": count, "width": width, "way": name, "milliseconds": times})
    heads_table(results).show(console)
    save_report(output, {"levels": LEVELS, "hidden": hidden, "dtype": dtype, "k": k, "drafts": results})
    console.print(f"written to {output}")


def heads_table(results: Sequence[dict[str, Any]]) -> Table:
    """A row per head, width and way."""
    shown = Table(f"Milliseconds of {LEVELS} draft levels (Lyanna, figure 13a)", ["head, nodes a level, way", *SHOWN])
    for row in results:
        times = row["milliseconds"]
        cells = [f"{times[part]:.2f}" if part in times else "" for part in SHOWN]
        shown.rows.append([f"{row['columns']:,}, {row['width']}, {row['way']}", *cells])
    return shown


HEADS = {"hot": HOT, "full": None, "bare": 64}
"""Rows of the untrained drafters' heads."""
BARE = "_bare"
VARIANTS = {"lyanna": HiddenStateDrafter.name, "eagle": EagleDrafter.name}


@app.command()
def untrained(
    model: Annotated[Path, typer.Option(help="Target: a folder made by redraft fetch.")],
    output: Annotated[Path, typer.Option(help="Folder for drafters and methods.toml.")],
) -> None:
    """Write untrained hidden-state and EAGLE-style drafters with each of HEADS, and their methods."""
    target, methods = Target.from_folder(model), []
    for variant, kind in VARIANTS.items():
        for head, rows in HEADS.items():
            torch.manual_seed(0)
            drafter = DRAFTERS[kind](DRAFTERS[kind].configure(target, rows), target)
            drafter.save(output / f"{variant}_{head}", {"target_fingerprint": target_fingerprint(target)})
            methods.append(f'[{variant}_{head}]\ndrafter = "{output / f"{variant}_{head}"}"\nngram = false\n')
    (output / METHODS).write_text("\n".join(methods))
    console.print(f"written to {output}")


def place_to_draft(reads_context: bool, features: int, context: int, pairs: int) -> DraftBatch:
    """One sequence of `context` ingested pairs and as many new ones; only the last pair where no context is kept."""
    if not reads_context:
        return DraftBatch.of_roots(np.ones((1, features), np.float32), np.ones(1, np.int32))
    return DraftBatch(
        features=np.ones((pairs, features), np.float32),
        tokens=np.ones(pairs, np.int32),
        row_offsets=np.array([0, pairs], np.int32),
        slots=np.zeros(1, np.int32),
        cache_lengths=np.array([context], np.int32),
    )


@app.command()
def drafters(
    bundle: Annotated[Path, typer.Option(help="Bundle with the methods.")],
    context: Annotated[int, typer.Option(help="Pairs that a drafter with a context has ingested.")] = 256,
    pairs: Annotated[int, typer.Option(help="Pairs that it ingests with the draft.")] = 2,
    repeats: Annotated[int, typer.Option(help="Drafts of each method.")] = 30,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("docs/results/drafting_latency.json"),
) -> None:
    """Time one draft call of each method of a bundle at batch 1; the methods take turns."""
    try:
        loaded = Bundle.load(bundle)
    except BundleError as error:
        raise typer.BadParameter(str(error)) from None
    config, engine = loaded.config, load_engine(loaded)
    batches = {
        name: place_to_draft(drafter.reads_context, config.target.feature_size, context, pairs)
        for name, drafter in engine.drafters.items()
    }
    other, samples = np.zeros(CACHE_BYTES // 8), {name: list[float]() for name in batches}
    for _ in range(repeats + 2):
        for name, batch in batches.items():
            other += 1
            started = time.perf_counter()
            engine.drafters[name].draft(batch)
            samples[name].append(1e3 * (time.perf_counter() - started))
    engine.close()
    times = {name: float(np.median(values[2:])) for name, values in samples.items()}
    columns = ["method", "drafter", "median", "best", "layers", "head, softmax, sampling"]
    shown = Table("Milliseconds of a draft at batch 1 (Lyanna, figure 13b)", columns)
    for name, value in times.items():
        layers = times.get(name.partition("_")[0] + BARE)
        parts = [] if layers is None or name.endswith(BARE) else [f"{layers:.2f}", f"{value - layers:.2f}"]
        best = f"{min(samples[name][2:]):.2f}"
        shown.rows.append([name, config.methods[name].drafter or "", f"{value:.2f}", best, *(parts or ["", ""])])
    shown.show(console)
    save_report(output, {"precision": config.precision, "context": context, "pairs": pairs, "milliseconds": times})
    console.print(f"written to {output}")


def verification(llm: LLM, requests: Sequence[GenerateRequest], concurrency: int) -> dict[str, float]:
    """Figures of the steps in which so many requests decode and no prompt is read: their number, their milliseconds and
    those of the verification on the host, its share, nodes visited for each request, and microseconds for each node."""
    scheduler = llm.runtime.scheduler
    step, verify = scheduler.step, scheduler._verify
    steps, spent, visited = list[float](), list[float](), list[int]()

    def timed_step() -> list[Any]:
        before, prompt_tokens, started = len(spent), scheduler.totals.prompt_tokens, time.perf_counter()
        outputs = step()
        if len(spent) > before:
            steps.append(time.perf_counter() - started)
            if scheduler.totals.prompt_tokens > prompt_tokens:
                del steps[before:], spent[before:], visited[before:]
        return outputs

    def timed_verify(sequences: list[Any], *given: Any) -> list[Verdict]:
        started = time.perf_counter()
        verdicts = verify(sequences, *given)
        if len(sequences) == concurrency:
            spent.append(time.perf_counter() - started)
            visited.append(sum(len(verdict.path) for verdict in verdicts))
        return verdicts

    llm.run(requests[:concurrency], concurrency)
    with patch.object(scheduler, "_verify", timed_verify), patch.object(scheduler, "step", timed_step):
        llm.run(requests, concurrency)
    return {
        "steps": len(steps),
        "step_ms": 1e3 * sum(steps) / len(steps),
        "verification_ms": 1e3 * sum(spent) / len(steps),
        "share": sum(spent) / sum(steps),
        "nodes": sum(visited) / len(steps) / concurrency,
        "node_us": 1e6 * sum(spent) / sum(visited),
    }


@app.command()
def rejection(
    bundle: Annotated[Path, typer.Option(help="With the method.")],
    dataset: Annotated[Path, typer.Option(help="Prompts, as the load test takes them.")],
    method: Annotated[str, typer.Option(help="That verifies by rejection.")] = "rsd_s",
    temperature: Annotated[float, typer.Option(help="Of the requests.")] = 1.0,
    sequences: Annotated[list[int], typer.Option(help="At once.")] = [1, 4, 16],
    num_prompts: Annotated[int, typer.Option(help="Requests for each number of sequences.")] = 48,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 64,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("docs/results/rejection.json"),
) -> None:
    """Time the host's verification of a method's drafts, beside the steps that it is part of."""
    try:
        llm, precision = LLM(bundle, prefix_reuse=False), Bundle.load(bundle).config.precision
    except BundleError as error:
        raise typer.BadParameter(str(error)) from None
    tokenizer = ChatTokenizer(bundle)
    texts = [tokenizer.chat(prompt.turns[0]) for prompt in spread(load_prompts(dataset), num_prompts)]
    requests = [
        request(text, max_tokens, method=method, temperature=temperature, seed=seed) for seed, text in enumerate(texts)
    ]
    times = {count: verification(llm, requests, count) for count in sequences}
    columns = ["sequences", "steps", "a step, ms", "verification, ms", "share", "nodes of each", "a node, us"]
    shown = Table(f"Verification of {method}", columns)
    for count, row in times.items():
        took = f"{row['step_ms']:.1f}", f"{row['verification_ms']:.2f}", f"{row['share']:.1%}"
        shown.rows.append([str(count), str(row["steps"]), *took, f"{row['nodes']:.2f}", f"{row['node_us']:.0f}"])
    shown.show(console)
    setting = {"precision": precision, "method": method, "temperature": temperature, "dataset": dataset.name}
    setting |= {"num_prompts": num_prompts, "max_tokens": max_tokens}
    save_report(output, {**setting, "sequences": times})
    console.print(f"written to {output}")


if __name__ == "__main__":
    app()
