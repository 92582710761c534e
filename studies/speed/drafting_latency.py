"""Where drafting's time goes: token by token against Lyanna's one pass (Lyanna, figure 13).

    python -m studies.speed.drafting_latency heads
    python -m studies.speed.drafting_latency untrained --model MODEL --output artifacts/drafters/untrained
    redraft build --model MODEL --methods artifacts/drafters/untrained/methods.toml --output BUNDLE
    python -m studies.speed.drafting_latency drafters --bundle BUNDLE

`heads` times the CPU operators that turn hidden states into drafted tokens: the LM head, softmax and sampling. Token by
token, each level's nodes go through the head; in one pass, the chain does so once, and each level adds what its nodes'
tokens say. `drafters` times the whole drafting networks of a bundle's methods; weights do not matter, so `untrained`
writes drafters and the methods that compare them: with the hot head, with the full one, and with hardly any. What the
first two take beyond the last is head, softmax and sampling; the rest is the layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import BundleFolder, ModelFolder, Repeats, Report, console, run
from benchmarks.speed import kernel_calls
from redraft.batch import DraftBatch
from redraft.bundle.backends import Precision
from redraft.bundle.manifest import Bundle
from redraft.console.program import Rows
from redraft.engines import load_engine
from redraft.errors import BundleError
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.model_defs.drafters.eagle import EagleDrafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.plugins.operators.linear.pack import PRECISIONS, pack

LEVELS = 5
HOT, INFO = 12288, 8192
CACHE_BYTES = 256 << 20
METHODS = "methods.toml"
HEAD, SAMPLING, FUSED, ALL = "LM head", "softmax and sampling", "both in one operator", "all"
SHOWN = (HEAD, SAMPLING, FUSED, ALL)
app = typer.Typer(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), no_args_is_help=True, rich_markup_mode=None)


class Head:
    """Random weights of a head over `columns` tokens, hidden states, and an int8 table of token info."""

    def __init__(self, columns: int, hidden: int, precision: str, width: int, k: int):
        """Trees have up to `width` nodes a level, with `k` children each."""
        rng = np.random.default_rng(0)
        self.columns, self.k = columns, k
        self.nodes = [1, *[width] * (LEVELS - 1)]
        self.weight = pack(rng.standard_normal((columns, hidden), dtype=np.float32) * hidden**-0.5, precision)
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
            kernel_calls.linear_topk(self.states[:nodes], self.weight, self.columns, self.k)
        return [FUSED] * LEVELS

    def _project(self, rows: int) -> np.ndarray:
        return kernel_calls.linear(self.states[:rows], self.weight, self.columns)

    def _sample(
        self, logits: np.ndarray, rows: np.ndarray, *table: np.ndarray, level: int = 0, levels: int = 1
    ) -> None:
        tokens = np.arange(len(rows), dtype=np.int32) * 3
        kernel_calls.token_info_topk(logits, rows, tokens, self.ids, *table, k=self.k, level=level, levels=levels)


WAYS: dict[str, Callable[[Head], list[str]]] = {
    "token by token": Head.iterative,
    "token by token, fused": Head.fused,
    "one pass": Head.one_pass,
}


def milliseconds(head: Head, way: Callable[[Head], list[str]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each part of a draft, and of all. Caches hold something else before each draft, as they do
    after a forward of the target."""
    with kernel_calls.Recording() as recording:
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


@app.command(cls=Rows)
def heads(
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 576,
    columns: Annotated[list[int], typer.Option(help="Tokens of the head.")] = [HOT, 49152],
    widths: Annotated[list[int], typer.Option("--beam-widths", help="Nodes of a level, one run for each.")] = [1, 4],
    k: Annotated[int, typer.Option(help="Children of a node.")] = 8,
    precision: Annotated[
        Precision,
        typer.Option(help=f"Stored form of the weights: {', '.join(PRECISIONS)}; drafters of bf16 bundles have int8."),
    ] = Precision.int8,
    repeats: Repeats = 30,
    output: Report = Path("artifacts/reports/drafting_heads.json"),
) -> None:
    """Time LM head, softmax and sampling of drafts of 5 levels at batch 1, token by token and in one pass."""
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"--precision {precision}: expected one of {', '.join(PRECISIONS)}")
    results = []
    for count in columns:
        for width in widths:
            head = Head(count, hidden, precision, width, k)
            for name, way in WAYS.items():
                times = milliseconds(head, way, repeats)
                results.append({"columns": count, "width": width, "way": name, "milliseconds": times})
    report = {"levels": LEVELS, "hidden": hidden, "precision": precision, "k": k, "drafts": results}
    finish(output, report, heads_table(results))


def heads_table(results: Sequence[dict[str, Any]]) -> Table:
    """A row per head, width and way."""
    result = Table(f"Milliseconds of {LEVELS} draft levels (Lyanna, figure 13a)", ["head, nodes a level, way", *SHOWN])
    for row in results:
        times = row["milliseconds"]
        cells = [f"{times[part]:.2f}" if part in times else "" for part in SHOWN]
        result.rows.append([f"{row['columns']:,}, {row['width']}, {row['way']}", *cells])
    return result


HEADS = {"hot": HOT, "full": None, "bare": 64}
"""Rows of the untrained drafters' heads."""
BARE = "_bare"
VARIANTS = {"lyanna": HiddenStateDrafter.name, "eagle": EagleDrafter.name}


@app.command(cls=Rows)
def untrained(
    model: ModelFolder,
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


@app.command(cls=Rows)
def drafters(
    bundle: BundleFolder,
    context: Annotated[int, typer.Option(help="Pairs that a drafter with a context has ingested.")] = 256,
    pairs: Annotated[int, typer.Option(help="Pairs that it ingests with the draft.")] = 2,
    repeats: Repeats = 30,
    output: Report = Path("artifacts/reports/drafting_latency.json"),
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
    result = Table("Milliseconds of a draft at batch 1 (Lyanna, figure 13b)", columns)
    for name, value in times.items():
        layers = times.get(name.partition("_")[0] + BARE)
        parts = [] if layers is None or name.endswith(BARE) else [f"{layers:.2f}", f"{value - layers:.2f}"]
        best = f"{min(samples[name][2:]):.2f}"
        result.rows.append([name, config.methods[name].drafter or "", f"{value:.2f}", best, *(parts or ["", ""])])
    report = {"precision": config.precision, "context": context, "pairs": pairs, "milliseconds": times}
    finish(output, report, result)


if __name__ == "__main__":
    run(app)
