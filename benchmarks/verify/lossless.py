"""Checks that speculation changes nothing: speculative against auto-regressive output of the same prompts.

    python -m benchmarks.verify.lossless --bundle SPEC_FP32

Every method of the bundle (or some, --method), against auto-regressive decoding by the same engine or by a bundle of
its own. Greedy and seeded sampling, with penalties, minimum length and bad words, one at a time and in a batch. Where
two texts part, the target's own margin between the two tokens is computed by teacher forcing: below --near-tie it is
listed as a near-tie, otherwise it is a failure. With --rate (for bf16 and int8 bundles) every greedy token of both is
also forced through the reference (a bundle in fp32), and the rates of tokens whose logit lies more than --margin below
the best are compared.

    mpiexec -n 2 python -m benchmarks.verify.lossless --bundle TWO_RANKS_FP32 --one-rank ONE_RANK_FP32

With --one-rank, a bundle of the same methods, every method of a tensor-parallel bundle (auto-regressive decoding among
them) is compared with itself on one rank, whatever its verifier. The margin of one that rejects drafts is how near a
random number of the token's position came to deciding otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.command import (
    PROMPTS_FILE,
    BundleFolder,
    Concurrency,
    MaxTokens,
    Methods,
    NumPrompts,
    PlainBundle,
    PromptsFile,
    Report,
    console,
    run,
)
from benchmarks.speed.inprocess import load_llm, methods_of, teacher_force
from redraft.bundle.folder import MANIFEST
from redraft.bundle.manifest import file_sha256
from redraft.console.progress import progress
from redraft.decoding.noise import coin, race
from redraft.decoding.sampling import Distribution, Sampler
from redraft.decoding.verification import VERIFIERS
from redraft.llm import LLM, Answer
from redraft.loadtest.results import finish, write_json
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import Prompt, load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.request_state import RequestState

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.15, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "greedy, bad words, minimum length": {"bad_words": ["the", " and", "important"], "min_length": 64},
    "temperature 1": {"temperature": 1.0, "seed": 1234},
    "temperature 0.7, top-p 0.9, top-k 40": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 99},
    "temperature 1, penalties, bad words": {
        "temperature": 1.0, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1, "frequency_penalty": 0.1,
        "bad_words": ["the", " is"], "min_length": 32,
    },
}  # fmt: skip
EDGES = [sign * 10.0**power for power in (-6, -5, -4) for sign in (1, -1)]
"""Relative changes of top-p that a near-tie at its edge may be worth."""
CHUNK = 16
"""Prompts that go through all outputs of a setting before the next."""


@dataclass
class Divergence:
    """Where speculative output first differs: the two tokens (-1: the text ends there) and the target's margin."""

    setting: str
    method: str
    concurrency: int
    question_id: str
    position: int
    expected: int
    got: int
    margin: float


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """Place of the first token that differs, or where one list ends; None if they are equal."""
    for index, pair in enumerate(zip(expected, got, strict=False)):
        if pair[0] != pair[1]:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def margin_at(reference: LLM, generation: GenerateRequest, expected: list[int], place: int, got: int) -> float:
    """How far from another token auto-regressive decoding was at a place of its answer, after the request's processors.

    Greedy: difference of the two logits. Sampling: see `distance_from`; or the change of top-p that draws the other
    token, where that is less.
    """

    top_p = generation.sampling.top_p

    def sequence_at(top_p: float | None) -> RequestState:
        sampling = generation.sampling.model_copy(update={"top_p": top_p})
        asked = generation.model_copy(update={"method": AUTO_REGRESSIVE, "sampling": sampling})
        sequence = reference.runtime.sequence(0, asked)
        for token in expected[:place]:
            sequence.sampler.accept(token)
        return sequence

    sequence = sequence_at(top_p)
    sampler, prompt = sequence.sampler, sequence.prompt.tolist()
    forced = [*prompt, *expected[:place]]
    logits = np.concatenate([chunk for chunk, _ in teacher_force(reference, forced, len(forced) - 1)])[-1]
    if sampler.greedy:
        values = sampler.process(logits)[[expected[place], got]]
        return float(abs(values[0] - values[1]))
    edges = [abs(edge) for edge in EDGES if top_p and sequence_at(top_p * (1 + edge)).sampler.choose(logits) == got]
    return min([distance_from(got, sampler, sampler.distribution(logits)), *edges])


def distance_from(token: int, sampler: Sampler, distribution: Distribution) -> float:
    """How much earlier than a token the winner of the position's race arrives, as a share of the token's time; 1 for a
    token that is not in the race."""
    ids = np.arange(len(distribution.weights)) if distribution.ids is None else distribution.ids
    with np.errstate(divide="ignore"):
        times = race(sampler.seed, sampler.position, ids) / distribution.weights
    (own,) = times[ids == token] if token in ids else [np.inf]
    return float(1 - times.min() / own)


def rejection_margin(
    reference: LLM, generation: GenerateRequest, expected: list[int], place: int, got: int
) -> float | None:
    """The same of a method that rejects drafts: the nearest that one of the position's random numbers came to deciding
    otherwise, in a run of only this request. None where it decided without drafts; infinite where that run's answer is
    another one before the place."""
    near: list[float] = []
    draw, flip = Sampler.draw, Sampler.flip

    def noted_draw(sampler: Sampler, distribution: Distribution) -> int:
        if sampler.position == place:
            near.append(distance_from(got, sampler, distribution))
        return draw(sampler, distribution)

    def noted_flip(sampler: Sampler, chance: float, number: int) -> bool:
        if sampler.position == place:
            near.append(abs(coin(sampler.seed, place, number) - chance))
        return flip(sampler, chance, number)

    with patch.object(Sampler, "draw", noted_draw), patch.object(Sampler, "flip", noted_flip):
        again = reference.run([generation])[0].token_ids
    if again[: place + 1] != expected[: place + 1]:
        return math.inf
    return min(near, default=None)


class Verifier:
    """Compares methods of an LLM with auto-regressive decoding by another (or the same), with a third that gives
    the margins. `chosen` are the methods; None: all. With `same_methods`, each is compared with itself by the first."""

    def __init__(
        self,
        auto_regressive: LLM,
        speculative: LLM,
        reference: LLM,
        chosen: list[str] | None = None,
        same_methods: bool = False,
    ):
        self.auto_regressive, self.speculative, self.reference = auto_regressive, speculative, reference
        self.same_methods, self._chosen = same_methods, chosen

    def methods(self, setting: str) -> list[str]:
        """The methods that promise the same tokens in a setting; for sampled ones these are the walking verifiers."""
        plans = self.speculative.runtime.methods
        if self.same_methods:
            return self._chosen or [AUTO_REGRESSIVE, *plans]
        sampled = "temperature" in SETTINGS[setting]
        return [
            name for name in self._chosen or list(plans) if not sampled or VERIFIERS[plans[name].verification].merges
        ]

    def compare(
        self, prompts: list[Prompt], requests: list[GenerateRequest], expected: list[Answer], got: list[Answer]
    ) -> list[tuple[str, int, int, int, float]]:
        """Where the answers part: question id, place, expected token, token got, margin."""
        divergences = []
        for prompt, generation, left, right in zip(prompts, requests, expected, got, strict=True):
            index = first_difference(left.token_ids, right.token_ids)
            if index is not None:
                end_ids = self.reference.runtime.end_ids
                wanted, other = (_token(answer, index, end_ids) for answer in (left, right))
                margin = self._margin(generation, [*left.token_ids[:index], wanted], index, other)
                divergences.append((prompt.question_id, index, wanted, other, margin))
        return divergences

    def _margin(self, generation: GenerateRequest, expected: list[int], place: int, got: int) -> float:
        plan = self.reference.runtime.methods.get(generation.method or "") if self.same_methods else None
        if plan and not generation.sampling.greedy and not VERIFIERS[plan.verification].merges:
            margin = rejection_margin(self.reference, generation, expected, place, got)
            if margin is not None:
                return margin
        return margin_at(self.reference, generation, expected, place, got)

    def far_tokens(self, requests: list[GenerateRequest], answers: list[Answer], margin: float) -> tuple[int, int]:
        """How many greedy tokens lie more than `margin` below the reference's best logit, and of how many."""
        far = total = 0
        for request, answer in zip(requests, answers, strict=True):
            prompt = self.reference.runtime.sequence(0, request).prompt.tolist()
            index = 0
            for logits, _ in teacher_force(self.reference, [*prompt, *answer.token_ids[:-1]], len(prompt) - 1):
                tokens = answer.token_ids[index : index + len(logits)]
                gap = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
                far, total, index = far + int((gap > margin).sum()), total + len(tokens), index + len(tokens)
        return far, total


def of_method(method: str, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """The same requests, to be served by a method."""
    return [generation.model_copy(update={"method": method}) for generation in requests]


def _token(answer: Answer, place: int, end_ids: frozenset[int]) -> int:
    return answer.token_ids[place] if place < len(answer.token_ids) else min(end_ids, default=0)


@dataclass(frozen=True)
class Plan:
    """What is compared, and what counts as a failure."""

    bundles: list[Path]
    """All of them, the one that drafts first."""
    prompts: Path
    num_prompts: int | None
    max_tokens: int
    settings: list[str]
    concurrency: list[int]
    near_tie: float
    margin: float | None
    """Rates of tokens so far below the best are compared too."""
    output: Path
    methods: list[str] | None = None
    tree_budget: int | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What a report depends on: the options and the bundles' contents."""
        options = {name: str(value) for name, value in vars(self).items() if name != "output"}
        return options | {"manifests": [file_sha256(bundle / MANIFEST) for bundle in self.bundles]}


def verify_setting(
    verifier: Verifier, setting: str, prompts: list[Prompt], plan: Plan, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Compare one setting over all prompts: a row for each concurrency, the divergences, and the rates."""
    tokenizer = ChatTokenizer(plan.bundles[0])
    counted = {"tokens": 0, "steps": 0, "accepted": 0}
    rows: dict[tuple[str, int], dict[str, Any]] = {
        (name, count): {"setting": setting, "method": name, "concurrency": count, **counted}
        for name in verifier.methods(setting)
        for count in plan.concurrency
    }
    divergences: list[Divergence] = []
    rates: dict[str, dict[str, Any]] = {}
    for start in range(0, len(prompts), CHUNK):
        chunk = prompts[start : start + CHUNK]
        requests = [tokenizer.request(prompt.turns[0], plan.max_tokens, **SETTINGS[setting]) for prompt in chunk]
        expected = verifier.auto_regressive.run(of_method(AUTO_REGRESSIVE, requests), CHUNK)
        outputs = {"auto-regressive": expected}
        for (method, concurrency), row in rows.items():
            asked = of_method(method, requests)
            got = verifier.speculative.run(asked, concurrency)
            if verifier.same_methods:
                expected = verifier.auto_regressive.run(asked, concurrency)
            outputs[f"{method}, {concurrency} at once"] = got
            differences = verifier.compare(chunk, asked, expected, got)
            divergences += [Divergence(setting, method, concurrency, *difference) for difference in differences]
            row["tokens"] += sum(len(answer.token_ids) for answer in expected)
            row["steps"] += sum(answer.stats.steps for answer in got)
            row["accepted"] += sum(answer.stats.accepted for answer in got)
        if plan.margin is not None and setting == "greedy":
            for name, answers in outputs.items():
                far, total = verifier.far_tokens(requests, answers, plan.margin)
                rate = rates.setdefault(name, {"output": name, "beyond_margin": 0, "tokens": 0})
                rate["beyond_margin"] += far
                rate["tokens"] += total
        advance(len(chunk))
    for key, row in rows.items():
        ties = [item.margin < plan.near_tie for item in divergences if (item.method, item.concurrency) == key]
        row |= {"near_ties": sum(ties), "failures": len(ties) - sum(ties)}
        row["acceptance_length"] = 1 + row.pop("accepted") / max(row.pop("steps"), 1)
    return {
        "settings": list(rows.values()),
        "divergences": [asdict(item) for item in divergences],
        "rates": list(rates.values()),
    }


def verify(verifier: Verifier, plan: Plan) -> dict[str, Any]:
    """Compare all settings over all prompts; the report is written after each setting. One that was cut short is gone
    on with where its inputs are the same."""
    prompts = spread(load_prompts(plan.prompts), plan.num_prompts)
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": plan.max_tokens, "margin": plan.margin}
    report |= {"inputs": plan.inputs, "settings": [], "rates": [], "divergences": []}
    earlier = json.loads(plan.output.read_bytes()) if plan.output.exists() else {}
    done = {row["setting"] for row in earlier.get("settings", [])}
    if earlier.get("inputs") == report["inputs"] and done != set(plan.settings):
        report = earlier
        console.print(f"going on after {', '.join(done)}")
    else:
        done = set()
    left = [setting for setting in plan.settings if setting not in done]
    with progress("verifying", len(left) * len(prompts), "prompts", console=console) as bar:
        for setting in left:
            bar.update(bar.done, setting)
            for name, rows in verify_setting(verifier, setting, prompts, plan, bar.advance).items():
                report[name] += rows
            write_json(plan.output, report)
    return report


def tables(report: dict[str, Any]) -> list[Table]:
    """The report as tables: settings, rates where they were taken, and every divergence."""
    title = f"Speculative against auto-regressive output, {report['prompts']} prompts x {report['max_tokens']} tokens"
    result = [Table(title, ["setting", "method", "at once", "tokens", "accepted", "near-ties", "failures"])]
    for row in report["settings"]:
        cells = [f"{row['acceptance_length']:.2f}", str(row["near_ties"]), str(row["failures"])]
        result[0].rows.append([row["setting"], row["method"], str(row["concurrency"]), f"{row['tokens']:,}", *cells])
    if report["rates"]:
        result.append(Table(f"Greedy tokens more than {report['margin']:g} below the reference's best logit",
                           ["output", "tokens", "rate"]))  # fmt: skip
        for row in report["rates"]:
            share = row["beyond_margin"] / max(row["tokens"], 1)
            result[-1].rows.append([row["output"], f"{row['tokens']:,}", f"{share:.3%}"])
    if report["divergences"]:
        columns = ["setting", "method", "prompt", "at once", "place", "expected", "got", "margin"]
        result.append(Table("Divergences", columns))
        for item in report["divergences"]:
            cells = [str(item[key]) for key in ("method", "question_id", "concurrency", "position", "expected", "got")]
            result[-1].rows.append([item["setting"], *cells, f"{item['margin']:.2g}"])
    return result


def main(
    bundle: BundleFolder,
    methods: Methods = None,
    settings: Annotated[list[str], typer.Option(metavar="SETTING", help="Sampling settings to check, by name.")] = list(
        SETTINGS
    ),
    auto_regressive: PlainBundle = None,
    one_rank: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Engine bundle of the same methods for one rank; default: none."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Engine bundle of fp32 for margins; default: the one that decodes auto-regressively.",
        ),
    ] = None,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = 128,
    concurrency: Concurrency = [1, 8],
    tree_budget: Annotated[
        int | None, typer.Option(help="Drafted nodes of each tree; default: as many as its method may draft.")
    ] = None,
    near_tie: Annotated[float, typer.Option(help="Margin below which two tokens are a tie.")] = 1e-3,
    rate: Annotated[bool, typer.Option("--rate", help="Compare rates of tokens beyond --margin.")] = False,
    margin: Annotated[float, typer.Option(help="Logits below the best one beyond which a token is counted.")] = 0.5,
    output: Report = Path("artifacts/reports/lossless.json"),
) -> int:
    """Returns 1 if a divergence is no near-tie."""
    if unknown := {*settings} - {*SETTINGS}:
        raise typer.BadParameter(f"--settings {', '.join(unknown)}: expected some of {'; '.join(SETTINGS)}")
    drafting = load_llm(bundle)
    if not drafting.runtime.methods:
        raise typer.BadParameter(f"--bundle: {bundle} has no method")
    chosen = methods_of(drafting, methods) if methods else None
    # Budgets that choose themselves draft next to nothing where drafts do not pay, and nothing would be compared.
    drafting.runtime.fix_budget(tree_budget)
    other = one_rank or auto_regressive
    plain = load_llm(other) if other else drafting
    margins = load_llm(reference) if reference and reference != other else plain
    bundles = [folder for folder in (bundle, auto_regressive, one_rank, reference) if folder]
    plan = Plan(
        bundles, prompts, num_prompts, max_tokens, settings, concurrency, near_tie, margin if rate else None, output,
        chosen, tree_budget,
    )  # fmt: skip
    report = verify(Verifier(plain, drafting, margins, chosen, one_rank is not None), plan)
    finish(output, report, *tables(report))
    failures = sum(row["failures"] for row in report["settings"])
    console.print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    run(main)
