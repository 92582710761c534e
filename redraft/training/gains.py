"""What a drafter gains: acceptance on held-out text, and speed by streams beside n-grams only and auto-regressive
decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft.bundle.config import BundleConfig
from redraft.chat import encode_user_turn
from redraft.console.progress import step
from redraft.home import DEFAULT_MODEL, SHIPPED
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.runtime import Runtime
from redraft.text import TextCodec
from redraft.training.prompts import divide
from redraft.whole_file import whole_file

STREAMS = (1, 2, 4, 8, 16)
TOKENS = 64
"""Tokens of each answer, at most."""
FEWEST = 8
"""Prompts that are answered, or as many as there are streams; fewer where there are no others."""
FILE = "gains.json"
Curve = Sequence[tuple[float, float]]
"""Positions that a drafter was trained on, and its chain's acceptance length after them."""


@dataclass(frozen=True)
class Speed:
    """How fast some number of streams are answered, prefill included, and what a step gains each of them."""

    streams: int
    tokens_per_s: float
    tokens_per_step: float


def unseen_prompts(prompts: Sequence[Prompt], cutoff: int, others: Sequence[Prompt]) -> list[str]:
    """First user turns that nothing was trained on, each once: of the prompts, those below the cutoff, which
    distillation held out; after them the others that are not among the prompts."""
    texts = {prompt.turns[0].strip() for prompt in prompts}
    held_out = divide(prompts, cutoff)[1]
    more = [prompt for prompt in others if prompt.turns[0].strip() not in texts]
    return list({prompt.turns[0].strip(): prompt.turns[0] for prompt in (*held_out, *more)}.values())


def fitting_prompts(model: Path, bundles: Sequence[Path], turns: Sequence[str]) -> list[list[int]]:
    """Token ids of user turns as the model continues them, of those that every bundle has room for with an answer of
    TOKENS.

    Raises ValueError where there are none, BundleError for a damaged bundle.
    """
    longest = min(BundleConfig.read(bundle).limits.max_len for bundle in bundles) - TOKENS
    codec = TextCodec.load(model / "tokenizer.json")
    encoded = (encode_user_turn(model, codec, turn) for turn in turns)
    prompts = [ids for ids in encoded if len(ids) <= longest]
    if not prompts:
        raise ValueError(
            f"none of {len(turns)} prompts to judge by has at most {longest} tokens: add some to --prompts"
        )
    return prompts


def measure_speed(runtime: Runtime, method: str, prompts: Sequence[list[int]], streams: int) -> Speed:
    """Answer the first prompts, each once, `streams` at a time."""
    scheduler, sent, count = runtime.scheduler, 0, min(max(FEWEST, streams), len(prompts))
    before = dict(scheduler.totals)
    while sent < count or not scheduler.idle:
        status = scheduler.status()
        for index in range(sent, min(sent + streams - status.running - status.waiting, count)):
            request = GenerateRequest(id=str(index), input_ids=prompts[index], max_tokens=TOKENS, method=method)
            scheduler.submit(runtime.sequence(index, request))
            sent += 1
        scheduler.step()
    gained = {name: value - before[name] for name, value in scheduler.totals}
    return Speed(
        streams=streams,
        tokens_per_s=round(gained["output_tokens"] / gained["step_s"], 2),
        tokens_per_step=round(1 + gained["accepted"] / max(gained["sequence_steps"], 1), 3),
    )


def measure_gains(drafter: Path, ngrams: Path, bundle: Path, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """The speeds of n-grams only, from a bundle without a drafter, and of the drafter's bundle, each number of streams
    right after auto-regressive decoding by the same bundle, so that a machine whose load changes slows both; with the
    last line of the training log. Also written beside the drafter. No more streams are measured than there are
    prompts."""
    log = (drafter / "log.jsonl").read_text().splitlines()
    result: dict[str, Any] = {"training": json.loads(log[-1]), "speed": {}}
    for name, folder in (("n-grams", ngrams), ("drafter", bundle)):
        with step(f"load {folder.name}"):
            runtime = Runtime.load(folder, prefix_reuse=False)
        for streams in STREAMS:
            if streams <= min(runtime.limits.slots, len(prompts)):
                with step(f"measure {name}, {streams} stream{'s' * (streams > 1)}"):
                    speeds = []
                    for method in (AUTO_REGRESSIVE, next(iter(runtime.methods))):
                        speeds.append(measure_speed(runtime, method, prompts, streams))
                plain, drafted = speeds
                row = asdict(drafted) | {"auto_regressive_tokens_per_s": plain.tokens_per_s}
                result["speed"].setdefault(name, []).append(row)
        runtime.engine.close()
    with whole_file(drafter / FILE) as file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def summary(gains: Mapping[str, Any], curves: Sequence[Curve]) -> list[str]:
    """Gains in words and a table, beside the learning curves of other drafters."""
    training, speed = gains["training"], gains["speed"]
    lines = []
    if length := training.get("chain_acceptance_length"):
        depths = " ".join(f"{rate:.2f}" for rate in training["conditional_acceptance"])
        least, most = gain_of_twice(curves, training["positions"])
        lines += [
            f"held-out conversations: chains accept {length:.2f} tokens/step (by depth {depths})",
            f"twice the hours: {length + least:.2f} to {length + most:.2f}, as the default model's drafters learnt",
        ]
    lines.append(f"{'streams':>7}  {'auto-regressive':>15}  {'n-grams only':>22}  {'drafter':>22}")
    for rows in zip(speed["n-grams"], speed["drafter"], strict=True):
        plain = [row["auto_regressive_tokens_per_s"] for row in rows]
        cells = [
            f"{row['tokens_per_s'] / beside:.2f}x, {row['tokens_per_step']:.2f} tokens/step"
            for row, beside in zip(rows, plain, strict=True)
        ]
        lines.append(f"{rows[0]['streams']:>7}  {plain[-1]:>8.0f} tokens/s  " + "  ".join(cells))
    return lines


def shipped_curves() -> list[Curve]:
    """The learning curves of the default model's drafters, which were trained for long."""
    files = sorted((SHIPPED / "drafters").glob(f"{DEFAULT_MODEL}*/training.jsonl"))
    logs = [file.read_text(encoding="utf-8") for file in files]
    records = [[json.loads(line) for line in log.splitlines()] for log in logs]
    return [[(record["positions"], record["chain_acceptance_length"]) for record in log] for log in records]


def gain_of_twice(curves: Sequence[Curve], positions: int) -> tuple[float, float]:
    """Tokens per step that a chain gained while a drafter's training positions doubled from so many: the
    least and the most over the curves. Beyond a curve's ends, its first or last doubling counts."""
    gains = []
    for curve in curves:
        trained, reached = zip(*curve, strict=True)
        doublings, length = np.log2(trained), np.maximum.accumulate(reached)
        here = np.clip(np.log2(positions), doublings[0], max(doublings[-1] - 1, doublings[0]))
        before, after = np.interp([here, here + 1], doublings, length)
        gains.append(float(after - before))
    return min(gains), max(gains)
