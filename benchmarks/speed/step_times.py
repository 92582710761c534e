"""Times a bundle's networks: a step of greedy requests by rows, contexts and sequences, and drafting by each method.

On a GPU a step includes sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.command import Repeats, Report, Threads, run
from redraft.batch import DraftBatch, DraftSampling, TargetBatch
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.console.progress import tracked
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import mask_width
from redraft.engines import load_engine
from redraft.engines.api import DraftEngine, DrawingEngine, Engine
from redraft.engines.features import take_rows
from redraft.errors import BundleError
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.request import SamplingConfig

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 1900)
BATCHES = (2, 4, 8)
CONTEXT = 256


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one kind of step: `rows` of each of `sequences` over `context` cached tokens; rows 0 is one
    call of the drafter of `method`."""

    sequences: int
    rows: int
    context: int
    median_ms: float
    best_ms: float
    method: str | None = None


def measure(engine: Engine, bundle: Bundle, repeats: int) -> list[StepTime]:
    """Time all kinds of steps that the bundle's limits allow, taking turns so that disturbances hit all alike."""
    limits = bundle.config.limits
    steps = [(1, rows, CONTEXT) for rows in ROWS] + [(1, 1, context) for context in CONTEXTS]
    steps += [(sequences, 1, CONTEXT) for sequences in BATCHES]
    most, longest = max(limits.max_tree, limits.prefill_chunk), limits.max_len + limits.max_tree
    steps = [s for s in steps if s[0] <= limits.slots and s[1] <= most and s[2] + s[1] <= longest]
    words = mask_width(limits.max_tree)
    calls: dict[tuple[int, int, int, str | None], Callable[[], object]] = {}
    greedy = Sampler(SamplingConfig(), [])
    for step in steps:
        calls[*step, None] = partial(engine.execute, TargetBatch.causal(*step, words), [greedy] * step[0])
    for name, drafter in engine.drafters.items():
        _, features = engine.execute(TargetBatch.causal(1, 1, 0, words))
        assert features is not None, "the engine has drafters"
        for sequences in (count for count in (1, *BATCHES) if count <= limits.slots):
            roots = DraftBatch.of_roots(take_rows(features, [0] * sequences), np.ones(sequences, np.int32))
            calls[sequences, 0, 0, name] = drafting_call(drafter, bundle.config.methods[name], roots)
    samples: dict[tuple[int, int, int, str | None], list[float]] = {kind: [] for kind in calls}
    rounds = 10
    for _ in tracked(range(rounds), "measuring", "rounds"):
        for kind, call in calls.items():
            call()
            for _ in range(-(-repeats // rounds)):
                start = time.perf_counter()
                call()
                samples[kind].append((time.perf_counter() - start) * 1e3)
    return [StepTime(*kind[:3], float(np.median(ms)), min(ms), kind[3]) for kind, ms in samples.items()]


def drafting_call(drafter: DraftEngine, method: MethodConfig, roots: DraftBatch) -> Callable[[], object]:
    """A call that drafts from these roots; at random, if the method does."""
    if not method.levels:
        return partial(drafter.draft, roots)
    assert isinstance(drafter, DrawingEngine)
    assert method.construction is not None
    count, shape = len(roots.slots), RANDOM_CONSTRUCTIONS[method.construction].shape(method.levels)
    noise = np.zeros((count, sum(shape.noise_rows), method.support), np.float32)
    ones = np.ones(count, np.float32)
    return partial(drafter.draw, roots, DraftSampling(noise, ones, np.zeros(count, np.int32), ones))


def table(times: list[StepTime], bundle: Bundle) -> Table:
    """The figures, each also as a multiple of one row over the usual context."""
    base = next(entry.median_ms for entry in times if (entry.sequences, entry.rows, entry.context) == (1, 1, CONTEXT))
    title = f"{bundle.config.name}: {bundle.config.backend}, {bundle.config.precision}"
    result = Table(title, ["step", "median ms", "best ms", "of one row"])
    for entry in times:
        step = f"{entry.sequences} x {entry.rows} rows, context {entry.context}"
        name = step if entry.rows else f"{entry.method}: draft for {entry.sequences}"
        result.rows.append([name, f"{entry.median_ms:.2f}", f"{entry.best_ms:.2f}", f"{entry.median_ms / base:.2f}"])
    return result


def main(
    bundle: Annotated[Path, typer.Argument(help="The bundle to measure.")],
    repeats: Repeats = 60,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/step_times.json"),
) -> None:
    try:
        loaded = Bundle.load(bundle)
        engine = load_engine(loaded, threads)
    except BundleError as error:
        raise typer.BadParameter(str(error)) from None
    times = measure(engine, loaded, repeats)
    finish(output, {"rows": [asdict(entry) for entry in times]}, table(times, loaded))


if __name__ == "__main__":
    run(main)
