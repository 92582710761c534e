"""The engine's times at load: a table of step times for the cost model to begin with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from redraft.batch import TargetBatch
from redraft.budgets.cost import StepCosts, TimeTable
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import mask_width
from redraft.engines.api import Engine
from redraft.request import SamplingConfig
from redraft.scheduling.slots import Limits

SECONDS = 2.0
"""The most that timing takes."""
ROUNDS = 3
"""Times that each count is timed, spread over all counts: a busy moment hits few of one count's."""


def time_steps(engine: Engine, limits: Limits, nodes: int, seconds: float = SECONDS) -> StepCosts:
    """Time the engine's steps with up to `nodes` drafted nodes for each slot, in at most `seconds` or so, and return
    the cost model that begins with them. Nothing may be running: the rows are written to the first slots. Where time
    ends early, the largest counts are left out."""
    tree = min(nodes + 1, limits.max_tree)
    shapes = list(_shapes(engine.step_shapes, limits, tree))
    # Those that every decision needs are timed first, whatever it takes.
    needed = shapes[0][1], tree
    shapes = sorted(shapes, key=lambda shape: shape[1] not in needed)
    required = sum(rows in needed for _, rows in shapes)
    batches = {shape: _batch(*shape, engine, limits) for shape in shapes}
    for shape in shapes[:required]:
        engine.execute(batches[shape])  # the first time it reads the weights, and takes seconds
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    # Greedy, as most requests are: engines on a GPU choose the tokens there, and fetch no logits.
    samplers = [Sampler(SamplingConfig(), [0]) for _ in range(limits.slots)]
    ends, last_s = time.perf_counter() + seconds, 0.0
    for turn in range(ROUNDS):
        for index, shape in enumerate(shapes):
            begun = time.perf_counter()
            # The next count has up to twice the rows of the last.
            if begun + 2 * last_s > ends and (turn or index >= required):
                break
            batch = batches[shape]
            chosen = samplers[: len(batch.slots)]
            if not turn:
                engine.execute(batch, chosen)  # a network may be compiled for a new number of rows
            started = time.perf_counter()
            engine.execute(batch, chosen)
            now = time.perf_counter()
            times[shape].append(now - started)
            last_s = now - begun
    tables = []
    for sequences in sorted({sequences for sequences, _ in shapes}):
        # Whatever else runs on a machine makes a step slower, never faster.
        least = {rows: min(timed) for (limit, rows), timed in sorted(times.items()) if limit == sequences and timed}
        if least:
            padded = bool(engine.step_shapes)
            tables.append(TimeTable(sequences=sequences, rows=[*least], seconds=[*least.values()], padded=padded))
            tables[-1].doubt()
    return StepCosts(tables=tables)


def _shapes(padded: Sequence[tuple[int, int]], limits: Limits, tree: int) -> Iterator[tuple[int, int]]:
    """Sequences and rows of the steps to time, few rows first, of trees of up to `tree` rows: those that the engine
    pads to, or else 1, 2, 4, ... rows for any number of sequences."""
    if padded:
        fitting = {(sequences, rows) for sequences, rows in padded if rows <= min(sequences, limits.slots) * tree}
        yield from sorted(fitting, key=lambda shape: shape[1])
        return
    rows = 1
    while rows < 2 * limits.slots * tree:
        yield limits.slots, min(rows, limits.slots * tree)
        rows *= 2


def _batch(sequences: int, rows: int, engine: Engine, limits: Limits) -> TargetBatch:
    """A step of `rows` rows: of as many sequences as have one each, where the engine pads to a number of sequences.
    Else of as few as may be, as the memory of a slot that was never used is first cleared, which takes long."""
    count = min(sequences, rows if engine.step_shapes else -(-rows // limits.prefill_chunk))
    words = mask_width(limits.max_tree)
    each = np.diff(np.linspace(0, rows, count + 1).astype(np.int32))
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in each])
    return TargetBatch(
        input_ids=np.zeros(rows, np.int32),
        positions=positions,
        row_offsets=np.concatenate([[0], np.cumsum(each)]).astype(np.int32),
        slots=np.arange(count, dtype=np.int32),
        cache_lengths=np.zeros(count, np.int32),
        tree_mask=np.zeros((rows, words), np.int32),
        commit_src=np.zeros(0, np.int32),
        commit_offsets=np.zeros(count + 1, np.int32),
        logit_rows=np.arange(rows, dtype=np.int32),
    )
