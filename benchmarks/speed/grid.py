"""Acceptance length against tree shape, and the shape with the most tokens per second.

    python -m benchmarks.speed.grid --bundle SPEC_BUNDLE [more bundles with other drafters or beam widths]

The target answers every prompt once, auto-regressively. Every tree shape is then replayed over those answers: since
speculation does not change the output, following the known answer through each step's tree gives exactly the
acceptance of a live run, at a fraction of its cost. Beams are those of the bundle's own beam width, cut to fewer or
shorter ones; a bundle per width shows the others. With step times measured here, the projected speed picks the shape.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table, number
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import forward, load_llm, teacher_force
from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.bundle.budget import BudgetTable, Scores
from redraft.console.progress import tracked
from redraft.decoding.construction import CONSTRUCTIONS, beams_of
from redraft.decoding.growth import grow_trees
from redraft.decoding.ngram import NgramIndex, ngram_chains
from redraft.decoding.packing import pack_beams
from redraft.decoding.token_tree import TokenTree, merge_trees, prune_tree
from redraft.engines.api import DraftEngine
from redraft.llm import LLM
from redraft.method import noise_at
from redraft.prompts import load_prompts, spread
from redraft.request import SamplingConfig, request
from redraft.sequence import Pairs

NGRAM_LENGTH = 8
console = Console()


@dataclass(frozen=True)
class Shape:
    """One way to build trees: `width` beams of `length`, or the `budget` best nodes up to depth `length`.

    Width 0 and budget 0 stand for only the n-gram branch.
    """

    width: int = 0
    length: int = 0
    budget: int = 0
    ngram: bool = False

    @property
    def name(self) -> str:
        """How tables call it."""
        neural = f"beams {self.width} x {self.length}" if self.width else f"best {self.budget}, depth {self.length}"
        parts = [neural] if self.width or self.budget else []
        return " + ".join([*parts, "n-grams"] if self.ngram else parts)


@dataclass
class Replay:
    """One answer with what the drafters would have proposed after each of its tokens but the last."""

    prompt: list[int]
    tokens: list[int]
    drafts: DraftCandidates
    reads_context: bool
    noise: SharedNoise
    """At each of these places that of the next tokens."""
    scores: Scores
    bigrams: np.ndarray | None = None


@dataclass
class Outcome:
    """Steps, accepted tokens and tree rows of a shape over all answers."""

    steps: int = 0
    accepted: int = 0
    rows: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per step."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def rows_per_step(self) -> float:
        """Mean rows of a step, root included."""
        return self.rows / max(self.steps, 1)


def shapes(drafts: DraftCandidates, budgets: list[int]) -> Iterator[Shape]:
    """The grid that a drafter's candidates allow, without and with the n-gram branch."""
    _, length, width, _ = drafts.candidates.shape
    widths = [w for w in (1, 2, 4, 6, 8, 16) if w < width] + [width]
    yield Shape(ngram=True, length=NGRAM_LENGTH)
    for ngram in (False, True):
        for beams in widths:
            for depth in range(2, length + 1):
                yield Shape(beams, depth, ngram=ngram)
        for budget in budgets:
            for depth in sorted({min(3, length), length}):
                yield Shape(0, depth, budget, ngram)


def record(llm: LLM, prompts: list[str], max_tokens: int, sampling: dict[str, Any], batch: int) -> list[Replay]:
    """Answers of the target and the drafter's candidates at every place of them."""
    llm.runtime.with_plans({})
    requests = [request(text, max_tokens, **{**sampling, "seed": i}) for i, text in enumerate(prompts)]
    answers = llm.run(requests, min(batch, llm.runtime.limits.slots))
    replays = []
    pairs = list(zip(requests, answers, strict=True))
    for generation, answer in tracked(pairs, "drafting everywhere", "answers", console):
        if len(answer.token_ids) < 2:
            continue
        sequence = llm.runtime.sequence(0, generation)
        prompt, tokens = sequence.prompt.tolist(), answer.token_ids
        scores = _scores(llm, generation.sampling)
        noise = _noise(generation.sampling, sequence.sampler.seed, scores, len(tokens) - 1)
        drafter, text = _drafter(llm), [*prompt, *tokens[:-1]]
        first = 0 if drafter.reads_context else len(prompt) - 1
        forced = teacher_force(llm, text[:-1], first)
        features = np.concatenate([chunk for _, chunk in forced if chunk is not None])
        if drafter.reads_context:
            batches = _growing(features, text, len(prompt), drafter)
        else:
            batches = _by_roots(features, text, batch)
        parts, place = [], 0
        for one in batches:
            here = slice(place, place := place + len(one.slots))
            part = drafter.draft(one, SharedNoise(**{name: array[here] for name, array in vars(noise).items()}))
            parts.append([part.candidates.copy(), part.log_probs.copy(), part.parents.copy()])
        drafts = DraftCandidates(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        replays.append(Replay(prompt, tokens, drafts, drafter.reads_context, noise, scores, llm.runtime.bigrams))
    return replays


def _scores(llm: LLM, sampling: SamplingConfig) -> Scores:
    """How the bundle's first method scores nodes of such requests."""
    plan = next(iter(llm.runtime.plans.values()))
    table = plan.budget or BudgetTable.constant(0)
    return table.scores_at(0.0 if sampling.greedy else sampling.divisor)


def _noise(sampling: SamplingConfig, seed: int, scores: Scores, places: int) -> SharedNoise:
    """The noise after each of an answer's tokens but the last."""
    seeds, positions = np.full(places, seed, np.uint64), np.arange(1, places + 1, dtype=np.int32)
    return noise_at(seeds, positions, [sampling] * places, [scores] * places)


def _by_roots(features: np.ndarray, text: list[int], batch: int) -> Iterator[DraftBatch]:
    """The last tokens of a text as roots, as many as there are rows of features."""
    roots = np.array(text[-len(features) :], np.int32)
    for start in range(0, len(roots), batch):
        rows = slice(start, start + batch)
        yield DraftBatch.of_roots(features[rows], roots[rows])


def _growing(features: np.ndarray, text: list[int], first: int, drafter: DraftEngine) -> Iterator[DraftBatch]:
    """The tokens of a text from `first` on as roots, one after the other: each ingests the pairs that are new."""
    pairs = Pairs(drafter.reads_text)
    if pairs.from_text:
        pairs.add(features[:1], text[:1])
    begin = 0
    for place in range(first, len(text)):
        pairs.add(features[begin:place], text[begin + 1 : place + 1])
        begin, ingested = place, pairs.ingested
        states, tokens = pairs.take()
        yield DraftBatch(
            features=np.concatenate(states),
            tokens=np.array(tokens, np.int32),
            row_offsets=np.array([0, len(tokens)], np.int32),
            slots=np.zeros(1, np.int32),
            cache_lengths=np.array([ingested], np.int32),
        )


def _drafter(llm: LLM) -> DraftEngine:
    """The drafter of the bundle's first method."""
    return next(iter(llm.runtime.engine.drafters.values()))


def build_trees(shape: Shape, replay: Replay) -> TokenTree:
    """The tree of a shape at every place of an answer, as one batch."""
    roots = np.array(replay.tokens[:-1], np.int32)
    drafts = replay.drafts
    arrays = (drafts.candidates, drafts.log_probs, drafts.parents)
    cut = DraftCandidates(*(array[:, : shape.length] for array in arrays))
    if shape.ngram:
        tree = _with_ngrams(shape, cut, roots, NgramIndex(replay.prompt, replay.bigrams), replay)
    elif shape.width:
        tree = pack_beams(roots, *beams_of(cut, shape.width))
    else:
        tree = CONSTRUCTIONS["best_first"].build(cut, roots, shape.budget)
    budget = shape.budget or int(tree.sizes.max())
    return prune_tree(tree, np.full(len(roots), budget, np.int32)) if (tree.sizes - 1 > budget).any() else tree


def _with_ngrams(
    shape: Shape, drafts: DraftCandidates, roots: np.ndarray, index: NgramIndex, replay: Replay
) -> TokenTree:
    """The same place by place, since an index knows what came before; `index` has read the prompt."""
    nodes = []
    for place in range(len(roots)):
        here = slice(place, place + 1)
        index.extend(roots[here].tolist())
        odds = [replay.scores.ngram_odds]
        own = DraftCandidates(drafts.candidates[here], drafts.log_probs[here], drafts.parents[here])
        if shape.budget:
            tree = grow_trees(own, roots[here], shape.budget, [index], odds, replay.reads_context)
        else:
            tree = ngram_chains(roots[here], [index], odds, NGRAM_LENGTH)
            if shape.width:
                tree = merge_trees([pack_beams(roots[here], *beams_of(own, shape.width)), tree])
        nodes += tree.nodes
    return TokenTree.from_nodes(nodes)


def follow(tree: TokenTree, tokens: list[int], outcome: Outcome) -> None:
    """Decode a known answer with the trees at its places; adds to the outcome."""
    place = 0
    while place < len(tokens) - 1:
        size = int(tree.sizes[place])
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(tree.parents[place, :size].tolist(), tree.tokens[place, :size].tolist(), strict=True)
            )
        }
        node = accepted = 0
        while place + accepted + 1 < len(tokens):
            found = children.get((node, tokens[place + accepted + 1]))
            if found is None:
                break
            node, accepted = found, accepted + 1
        outcome.steps += 1
        outcome.accepted += accepted
        outcome.rows += size
        place += accepted + 1


def step_times(llm: LLM, rows: list[int], rounds: int = 12) -> dict[int, float]:
    """Median seconds of a target forward of each number of rows after 256 cached tokens, taken in turns.

    A number of rows that differs from the forward's before costs extra: the second of two counts.
    """
    cached = min(256, llm.runtime.limits.max_len // 2)
    for _ in teacher_force(llm, [1] * cached, cached - 1):
        pass
    samples: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(rounds):
        for count in rows:
            ids, wanted = np.ones(count, np.int32), np.arange(count, dtype=np.int32)
            forward(llm, ids, cached, wanted)
            samples[count].append(_seconds(partial(forward, llm, ids, cached, wanted)))
    return {count: float(np.median(values)) for count, values in samples.items()}


def drafting_time(llm: LLM, rounds: int = 20) -> float:
    """Median seconds of one drafter call for one sequence."""
    ((_, features),) = teacher_force(llm, [1], 0)
    assert features is not None
    batch = DraftBatch.of_roots(features, np.ones(1, np.int32))
    return float(np.median([_seconds(partial(_drafter(llm).draft, batch)) for _ in range(rounds)]))


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(llm: LLM, prompts: list[str], args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Every shape's acceptance, rows and projected speed on one bundle."""
    replays = record(llm, prompts, args.max_tokens, {"temperature": args.temperature}, args.batch)
    rows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    times = step_times(llm, [count for count in rows if count <= llm.runtime.limits.max_tree])
    drafting = drafting_time(llm)
    results = []
    for shape in tracked(list(shapes(replays[0].drafts, args.budgets)), f"replaying on {name}", "shapes", console):
        outcome = Outcome()
        for replay in replays:
            follow(build_trees(shape, replay), replay.tokens, outcome)
        if outcome.rows_per_step > max(times):
            continue
        target_s = float(np.interp(outcome.rows_per_step, list(times), list(times.values())))
        step_s = target_s + (drafting if shape.width or shape.budget else 0.0)
        results.append(
            {
                "bundle": name,
                "shape": shape.name,
                **vars(shape),
                "acceptance_length": outcome.acceptance_length,
                "rows_per_step": outcome.rows_per_step,
                "projected_speedup": outcome.acceptance_length * times[1] / step_s,
            }
        )
    return results


def table(results: list[dict[str, Any]], most: int | None = None) -> Table:
    """The grid, fastest shape first, or only the `most` fastest."""
    columns = ["shape", "bundle", "accepted", "rows/step", "speed-up"]
    grid = Table("Tree shapes by projected speed-up", columns)
    for row in sorted(results, key=lambda row: -row["projected_speedup"])[:most]:
        figures = [number(row[key], 2) for key in ("acceptance_length", "rows_per_step", "projected_speedup")]
        grid.rows.append([row["shape"], row["bundle"], *figures])
    return grid


def main(argv: list[str] | None = None) -> int:
    """Replay the grid on each bundle, print it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, nargs="+", required=True, help="bundles with drafter")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--budgets", type=int, nargs="+", default=[2, 4, 6, 8, 12, 16, 24, 32])
    add("--batch", type=int, default=8, help="sequences that the drafter drafts for at once")
    add("--output", type=Path, default=Path("artifacts/reports/grid.json"))
    args = parser.parse_args(argv)
    users = [prompt.turns[0] for prompt in spread(load_prompts(args.dataset), args.num_prompts)]
    results = []
    for bundle in args.bundle:
        llm, tokenizer = load_llm(parser, bundle), ChatTokenizer(bundle)
        if not llm.runtime.engine.drafters:
            parser.error(f"--bundle: {bundle} has no drafter")
        results += measure(llm, [tokenizer.chat(user) for user in users], args, bundle.name)
        llm.close()
        write_json(args.output, {"temperature": args.temperature, "prompts": len(users), "shapes": results})
    table(results, 20).show(console)
    console.print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
