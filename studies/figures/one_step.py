"""Records one decoding step of a real answer: the example of docs/how-it-works.md.

The bundle drafts ReDrafter's beams without the n-gram branch:

    redraft build --model artifacts/models/SmolLM2-135M-Instruct \\
      --drafter drafters/SmolLM2-135M-Instruct --precision fp32 --construction beam --beam-width 3 --beam-length 3 \\
      --no-ngram --slots 2 --max-len 512 --output artifacts/engines/one-step
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.figures.results import write_json
from redraft.batch import DraftCandidates, TargetBatch
from redraft.chat import render_chat
from redraft.decoding.construction import beams_of
from redraft.decoding.noise import race
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.request import GenerateRequest, SamplingConfig
from redraft.runtime import Runtime

PROMPT, TEMPERATURE, SEED, STEP = "How do I make tea?", 0.7, 5, 2
"""The request, and which of its speculative steps is recorded: one whose accepted path leaves a gap in the cache."""
FIELDS = ("input_ids", "positions", "cache_lengths", "tree_mask", "commit_src")
SHOWN = 5
"""Tokens of the target that are recorded at each row."""
out = Console(stderr=True, highlight=False)


class Recorder:
    """Notes what a runtime's engine is given and what it gives, one entry per step of the only request."""

    def __init__(self, runtime: Runtime):
        self.batches: list[TargetBatch] = []
        self.logits: list[np.ndarray] = []
        self.drafts: list[DraftCandidates] = []
        self.verdicts: list[tuple[TokenTree, Verdict]] = []
        engine, (drafter,) = runtime.engine, runtime.engine.drafters.values()
        execute, draft = engine.execute, drafter.draft

        def executed(batch: TargetBatch, samplers: Any = None) -> Any:
            logits, hidden = execute(batch, samplers)
            self.batches.append(batch)
            self.logits.append(np.array(logits[:]))
            return logits, hidden

        def drafted(batch: Any, noise: Any = None) -> DraftCandidates:
            candidates = draft(batch, noise)
            arrays = (candidates.candidates, candidates.log_probs, candidates.parents)
            self.drafts.append(DraftCandidates(*(array.copy() for array in arrays)))
            return candidates

        engine.execute, drafter.draft = executed, drafted  # type: ignore[method-assign]
        runtime.with_plans(runtime.plans, lambda tree, _, verdict: self.verdicts.append((tree, verdict)))


def main(
    bundle: Annotated[Path, typer.Option(help="A bundle built as above.")],
    output: Annotated[Path, typer.Option(help="Where to write the example.")] = Path("docs/pictures/one_step.json"),
) -> None:
    """Answer the prompt and record one step of it."""
    runtime = Runtime.load(bundle, prefix_reuse=False)
    recorder = Recorder(runtime)
    sampling = SamplingConfig(temperature=TEMPERATURE, seed=SEED)
    request = GenerateRequest(
        id="r", text=render_chat(bundle, PROMPT), add_special_tokens=False, max_tokens=40, sampling=sampling
    )
    sequence = runtime.sequence(0, request)
    runtime.scheduler.submit(sequence)
    tokens: list[int] = []
    while not runtime.scheduler.idle:
        for one in runtime.scheduler.step():
            tokens += one.token_ids
    prefills = len(recorder.batches) - len(recorder.verdicts)
    step = prefills + STEP
    position = 1 + sum(len(verdict.tokens) for _, verdict in recorder.verdicts[:STEP])
    beams, log_probs = beams_of(recorder.drafts[STEP], recorder.drafts[STEP].candidates.shape[2])
    tree, _ = recorder.verdicts[STEP]
    depths = [path.bit_count() - 1 for path in tree.ancestors[0]]
    rows = [
        target_row(sampling, recorder.logits[step][row], position + depth, runtime) for row, depth in enumerate(depths)
    ]
    known = {*beams.flat, *recorder.batches[step].input_ids, *recorder.batches[step + 1].input_ids}
    known |= {token for row in rows for token in map(int, row["scores"])}
    example = {
        "prompt": PROMPT,
        "temperature": TEMPERATURE,
        "seed": SEED,
        "position": position,
        "answer": runtime.codec.decode(tokens[:position]),
        "beams": beams[0].tolist(),
        "log_probs": np.round(log_probs[0].astype(float), 4).tolist(),
        "step": {name: getattr(recorder.batches[step], name).tolist() for name in FIELDS},
        "next_step": {name: getattr(recorder.batches[step + 1], name).tolist() for name in FIELDS},
        "target": rows,
        "texts": {str(token): runtime.codec.decode([int(token)]) for token in sorted(map(int, known))},
    }
    write_json(output, example)
    out.print(f"{output}: step {STEP} of {len(recorder.verdicts)}, after {example['answer']!r}")


def target_row(sampling: SamplingConfig, logits: np.ndarray, position: int, runtime: Runtime) -> dict[str, Any]:
    """What the target says at one row: the token that the sampler chooses for this output position; and of the most
    likely tokens and the chosen one the log-probability and the position's Gumbel noise."""
    sampler = Sampler(sampling, [], runtime.end_ids)
    sampler.position = position
    probabilities = sampler.distribution(logits).at(np.arange(len(logits)))
    token = sampler.choose(logits)
    likely = np.argsort(-probabilities, kind="stable")[:SHOWN].tolist()
    shown = likely if token in likely else [*likely[:-1], token]
    noise = -np.log(race(sampler.seed, position, np.array(shown)))
    scores = zip(shown, np.log(probabilities[shown]).tolist(), noise.tolist(), strict=True)
    return {"token": token, "scores": {str(one): [round(log, 4), round(g, 4)] for one, log, g in scores}}


if __name__ == "__main__":
    typer.run(main)
