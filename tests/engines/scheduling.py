"""Requests of all samplings through the real scheduler on an engine. Ranks import it, so it does without torch, whose
import would take longer than what they do."""

from __future__ import annotations

import numpy as np

from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.engines.api import Engine
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.toy_engine import toy_codec

VOCAB = 111
METHOD = "tiny"
"""What the tiny bundle's only method is called."""
CODEC = toy_codec(VOCAB)
SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 9, "seed": 4},
]
TABLE = BudgetTable(
    entries=[
        BudgetEntry(running=1, nodes=9),
        BudgetEntry(running=1, temperature=0.3, nodes=7),
        BudgetEntry(running=3, nodes=5),
        BudgetEntry(running=3, temperature=0.3, nodes=0),
    ]
)
"""With three or more sequences, sampled ones do not draft: their pairs stay pending."""


def requests() -> list[RequestState]:
    """Prompts from one token to several chunks, of all samplings."""
    rng = np.random.default_rng(1)
    made = []
    for key, count in enumerate((40, 1, 17, 5, 33, 16, 2)):
        prompt = rng.integers(1, VOCAB, count).tolist()
        sampling = SAMPLINGS[key % len(SAMPLINGS)]
        request = GenerateRequest(id=str(key), input_ids=prompt, max_tokens=25 - key, sampling=sampling)
        made.append(RequestState(key, request, prompt, CODEC, frozenset({0})))
    return made


def scores(engine: Engine) -> tuple[list[int], list[float]]:
    """Tokens of a prompt of several chunks and of its answer, beside requests that nobody scores, and the
    log-probabilities of all but the first."""
    limits = Limits(slots=3, max_len=80, max_tree=40, prefill_chunk=16)
    scheduler = Scheduler(engine, limits)
    prompt = np.random.default_rng(2).integers(1, VOCAB, 37).tolist()
    request = GenerateRequest(id="scored", input_ids=prompt, max_tokens=9, return_log_probs=True, prompt_log_probs=True)
    for sequence in (*requests()[1:3], RequestState("scored", request, prompt, CODEC, frozenset())):
        scheduler.submit(sequence)
    outputs = []
    while not scheduler.idle:
        outputs += [output for output in scheduler.step() if output.key == "scored"]
    (output,) = outputs
    return [*prompt, *output.token_ids], [*output.prompt_log_probs[1:], *output.log_probs]


def generate(
    engine: Engine, plan: MethodConfig | None, cancelled: tuple[int, ...] = (), method: str = METHOD
) -> tuple[dict[int, list[int]], Scheduler]:
    """Tokens of every request; they join two at a time, and some are cancelled soon. `method` has the drafter."""
    limits = Limits(slots=3, max_len=80, max_tree=40, prefill_chunk=16)
    scheduler, tokens = Scheduler(engine, limits, {method: plan} if plan else {}), dict[int, list[int]]()
    waiting = requests()
    for step in range(1000):
        if step % 4 == 0:
            for sequence in waiting[:2]:
                scheduler.submit(sequence)
            waiting = waiting[2:]
        if step == 9:
            for key in cancelled:
                scheduler.cancel(key)
        for output in scheduler.step():
            if output.finish_reason != "cancelled":
                tokens[output.key] = tokens.get(output.key, []) + output.token_ids
        if scheduler.idle and not waiting:
            break
    return tokens, scheduler
