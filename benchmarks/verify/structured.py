"""Checks that speculation changes no structured answer, that every finished one is valid, and what grammars cost.

    python -m benchmarks.verify.structured --bundle BUNDLE
    python -m benchmarks.verify.structured --bundle BUNDLE --schemas schemas.jsonl --num-schemas 200 --num-prompts 80
    python -m benchmarks.verify.structured --bundle BUNDLE --method all --num-schemas 20 --num-prompts 8
    python -m benchmarks.verify.structured --bundle BUNDLE --speed --num-schemas 0 --num-prompts 20

The default method of a bundle against auto-regressive decoding with the same masks, greedy and seeded: each schema with
its own prompt, then --num-prompts prompts of a data set with the schema --prompts-schema. --method all is
every method that verifies by a walk.
Where two texts part, the target's margin between the two tokens is computed by teacher forcing: below --near-tie it is
listed, otherwise it is a failure. Answers are made --concurrency at a time, each step with drafts, and the answers to
one prompt reuse its rows.

With --speed they are made one at a time and timed, without reuse, and the same prompts are answered without schema and
grammar too: what drafts are worth to JSON and to plain text.

`--schemas` is a file of lines {"name", "prompt", "schema"}, or a folder of JSON schemas, such as JSONSchemaBench's
`data`. Schemas that the library refuses, and those whose prompt is too long, are counted apart. What is done is kept
beside --output: the same command goes on where it was cut short.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from jsonschema import Draft202012Validator

from benchmarks.command import (
    PROMPTS_FILE,
    BundleFolder,
    MaxTokens,
    PromptsFile,
    Report,
    Threads,
    console,
    run,
)
from benchmarks.speed.inprocess import load_llm, methods_of
from benchmarks.verify.lossless import first_difference, margin_at
from redraft.bundle.folder import MANIFEST
from redraft.bundle.manifest import file_sha256
from redraft.console.progress import progress
from redraft.decoding.verification import VERIFIERS
from redraft.grammar.state import GrammarState
from redraft.llm import LLM, Answer
from redraft.loadtest.results import save_report, write_json
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, Guide, InvalidRequest

SCHEMAS = Path(__file__).parents[1] / "schemas.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7}}
ASK = "{prompt}\n\nAnswer with JSON by this JSON schema, and nothing else:\n{schema}"
EXAMPLE = "Write an example of what the schema describes."
PLAIN_TOKENS = 128
"""Most tokens of an answer without a grammar."""
GRAMMAR_CALLS = ("mask", "advance", "forced")


@dataclass(frozen=True)
class Case:
    """A prompt and the schema of its answer."""

    name: str
    prompt: str
    schema: Any

    def request(self, tokenizer: ChatTokenizer, setting: str, max_tokens: int, guided: bool) -> GenerateRequest:
        """The prompt with the schema and its guide, or by itself."""
        if not guided:
            return tokenizer.request(self.prompt, min(max_tokens, PLAIN_TOKENS), **SETTINGS[setting])
        schema = json.dumps(self.schema, ensure_ascii=False)
        guide = Guide(kind="json_schema", text=schema)
        return tokenizer.request(
            ASK.format(prompt=self.prompt, schema=schema), max_tokens, **SETTINGS[setting], guide=guide
        )


@dataclass
class Run:
    """One answer. `margin`: of the token at which it parts from auto-regressive decoding's, where it does. Times are
    there only where answers are made one at a time."""

    case: str
    setting: str
    method: str
    guided: bool
    finish: str
    valid: bool | None
    tokens: int
    steps: int
    drafted: int
    accepted: int
    decode_ms: float | None
    grammar_ms: float | None
    margin: float | None = None


@dataclass(frozen=True)
class Plan:
    """What is asked."""

    bundle: Path
    schemas: Path
    num_schemas: int | None
    prompts: Path
    num_prompts: int
    prompts_schema: str
    max_tokens: int
    near_tie: float
    concurrency: int
    tree_budget: int
    speed: bool
    output: Path


class GrammarClock:
    """Seconds inside the grammar's calls, not counting calls that another one makes twice."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every state's calls meanwhile."""
        shipped = {name: getattr(GrammarState, name) for name in GRAMMAR_CALLS}
        with patch.multiple(GrammarState, **{name: self._timed(call) for name, call in shipped.items()}):
            yield

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            started, self._depth = time.perf_counter(), self._depth + 1
            try:
                return call(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


def load_schemas(path: Path) -> list[Case]:
    """The cases of a file of lines, or one for each JSON file in a folder, in the order of their names."""
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        return [
            Case(file.relative_to(path).with_suffix("").as_posix(), EXAMPLE, json.loads(file.read_text()))
            for file in files
        ]
    return [Case(**json.loads(line)) for line in path.read_text().splitlines()]


def usable(
    llm: LLM, cases: Sequence[Case], tokenizer: ChatTokenizer, max_tokens: int
) -> tuple[list[Case], dict[str, dict[str, Any]]]:
    """The cases that can be answered; for the others why not, after how many seconds, and whether it is the schema."""
    result, refused = [], {}
    for case in cases:
        started, asked = time.perf_counter(), case.request(tokenizer, "greedy", max_tokens, guided=True)
        try:
            llm.runtime.sequence(0, asked)
            result.append(case)
        except InvalidRequest as error:
            seconds, by_schema = time.perf_counter() - started, str(error).startswith("guide")
            refused[case.name] = {"error": str(error), "seconds": round(seconds, 3), "schema": by_schema}
    return result, refused


def run_cases(llm: LLM, cases: Sequence[tuple[Case, str]], methods: Sequence[str], plan: Plan) -> list[Run]:
    """All methods' runs of cases, each in a setting, auto-regressive decoding first; --speed: one at a time, timed,
    and without a guide too."""
    tokenizer = ChatTokenizer(plan.bundle)
    asked = [
        (case, setting, one.model_copy(update={"method": method}))
        for case, setting in cases
        for guided in (True, False)[: 1 + plan.speed]
        for one in [case.request(tokenizer, setting, plan.max_tokens, guided)]
        for method in (AUTO_REGRESSIVE, *methods)
    ]
    answers, grammar_ms = list[Answer](), list[float | None]()
    if plan.speed:
        for _, _, one in asked:
            clock = GrammarClock()
            with clock.running():
                answers += llm.run([one])
            grammar_ms.append(1e3 * clock.seconds)
    else:
        answers, grammar_ms = llm.run([one for _, _, one in asked], plan.concurrency), [None] * len(asked)
    runs, expected = [], answers[0]
    for (case, setting, one), found, spent in zip(asked, answers, grammar_ms, strict=True):
        stats, guided, margin = found.stats, one.guide is not None, None
        expected = found if one.method == AUTO_REGRESSIVE else expected
        if guided and (place := first_difference(expected.token_ids, found.token_ids)) is not None:
            margin = margin_between(llm, one, expected, found, place)
        whole = guided and found.finish_reason == "stop"
        runs.append(
            Run(
                case=case.name, setting=setting, method=one.method or "", guided=guided,
                finish=found.finish_reason or "", valid=is_valid(found.text, case.schema) if whole else None,
                tokens=stats.output_tokens, steps=stats.steps, drafted=stats.drafted, accepted=stats.accepted,
                decode_ms=stats.decode_ms if plan.speed else None, grammar_ms=spent, margin=margin,
            )
        )  # fmt: skip
    return runs


def margin_between(llm: LLM, asked: GenerateRequest, expected: Answer, found: Answer, place: int) -> float:
    """See `margin_at`; infinite where one of the texts ends. No rows are reused after it: it writes to a slot."""
    if place >= min(len(expected.token_ids), len(found.token_ids)):
        return float("inf")
    margin = margin_at(llm, asked, expected.token_ids, place, found.token_ids[place])
    llm.runtime.scheduler.drop_all()
    return margin


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema describes, by another implementation of JSON Schema."""
    try:
        return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(
            json.loads(text)
        )
    except ValueError:
        return False


def verify(llm: LLM, plan: Plan, methods: Sequence[str]) -> dict[str, Any]:
    """All cases in all settings; the report, written to `plan.output` as it grows, its runs beside it."""
    cases, refused = usable(llm, load_schemas(plan.schemas), ChatTokenizer(plan.bundle), plan.max_tokens)
    cases = spread(cases, plan.num_schemas)
    schemas = len(cases)
    if plan.num_prompts:
        (schema,) = [case.schema for case in load_schemas(SCHEMAS) if case.name == plan.prompts_schema]
        prompts = spread(load_prompts(plan.prompts), plan.num_prompts)
        cases += [Case(f"prompt {prompt.question_id}", prompt.turns[0], schema) for prompt in prompts]
    inputs = {
        "bundle": plan.bundle.name, "manifest": file_sha256(plan.bundle / MANIFEST), "schemas": schemas,
        "prompts": plan.num_prompts, "max_tokens": plan.max_tokens, "methods": [*methods], "speed": plan.speed,
        "tree_budget": None if plan.speed else plan.tree_budget,
    }  # fmt: skip
    kept, runs = plan.output.with_suffix(".runs.json"), list[Run]()
    earlier = json.loads(kept.read_bytes()) if kept.exists() else {}
    if earlier.get("inputs") == json.loads(json.dumps(inputs)):
        runs = [Run(**run) for run in earlier["runs"]]
    done = {(run.case, run.setting) for run in runs}
    left = [(case, setting) for case in cases for setting in SETTINGS if (case.name, setting) not in done]
    report = summary(inputs, refused, runs, plan)
    with progress("verifying", len(left), "answers", console=console) as bar:
        for start in range(0, len(left), 2 * plan.concurrency):
            part = left[start : start + 2 * plan.concurrency]
            runs += run_cases(llm, part, methods, plan)
            write_json(kept, {"inputs": inputs, "runs": [asdict(run) for run in runs]})
            report = summary(inputs, refused, runs, plan)
            save_report(plan.output, report)
            bar.advance(len(part))
    return report


def summary(
    inputs: dict[str, Any], refused: dict[str, dict[str, Any]], runs: Sequence[Run], plan: Plan
) -> dict[str, Any]:
    """What the runs show: counts of texts, and speed over auto-regressive decoding with and without grammars."""
    reasons = [refusal for refusal in refused.values() if refusal["schema"]]
    report: dict[str, Any] = {
        **inputs,
        "refused": len(reasons),
        "slowest_refusal_s": max((refusal["seconds"] for refusal in reasons), default=0.0),
        "too_long": len(refused) - len(reasons),
        "texts": [],
        "speed": [],
        "differences": [asdict(run) for run in runs if run.margin is not None],
        "invalid": [asdict(run) for run in runs if run.valid is False],
        "refusals": refused,
    }
    groups: dict[tuple[str, str, bool], list[Run]] = {}
    for item in runs:
        groups.setdefault((item.method, item.setting, item.guided), []).append(item)
    for (method, setting, guided), rows in groups.items():
        named = {"method": method, "setting": setting}
        steps = max(sum(run.steps for run in rows), 1)
        per_step = (steps + sum(run.accepted for run in rows)) / steps
        if guided:
            ties = Counter(run.margin < plan.near_tie for run in rows if run.margin is not None)
            counts = {
                "answers": len(rows),
                "finished": sum(run.finish == "stop" for run in rows),
                "valid": sum(run.valid is True for run in rows),
            }
            same = {"near_ties": ties[True], "failures": ties[False], "tokens_per_step": per_step}
            report["texts"].append(named | counts | same)
        if plan.speed:
            base = groups[AUTO_REGRESSIVE, setting, guided]
            rate, base_rate = (
                1e3 * sum(run.tokens for run in group) / sum(run.decode_ms or 0 for run in group)
                for group in (rows, base)
            )
            grammar_ms = sum(run.grammar_ms or 0 for run in rows) / steps
            speed = {"grammar": guided, "tokens_per_step": per_step, "grammar_ms_per_step": grammar_ms}
            report["speed"].append(named | speed | {"tokens_per_s": rate, "speedup": rate / base_rate})
    return report


def texts_table(report: dict[str, Any]) -> Table:
    """How many answers there are of each kind."""
    names = ["method", "setting", "answers", "finished", "valid", "near-ties", "failures", "tokens/step"]
    table = Table(f"Structured answers: {report['refused']} schemas refused, {report['too_long']} too long", names)
    for row in report["texts"]:
        counts = [str(row[name]) for name in ("answers", "finished", "valid", "near_ties", "failures")]
        table.rows.append([row["method"], row["setting"], *counts, f"{row['tokens_per_step']:.2f}"])
    return table


def speed_table(report: dict[str, Any]) -> Table:
    """What drafts are worth with a grammar, and to plain text."""
    names = ["method", "setting", "answers", "tokens/step", "grammar ms/step", "tokens/s", "speed-up"]
    table = Table("Acceptance and speed", names)
    for row in report["speed"]:
        figures = [f"{row['tokens_per_step']:.2f}", f"{row['grammar_ms_per_step']:.2f}"]
        figures += [f"{row['tokens_per_s']:.0f}", f"{row['speedup']:.2f}x"]
        table.rows.append([row["method"], row["setting"], "JSON" if row["grammar"] else "text", *figures])
    return table


def main(
    bundle: BundleFolder,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Methods of the bundle, or `all` whose drafts a sampled walk verifies. Default: its first.",
        ),
    ] = None,
    schemas: Annotated[
        Path, typer.Option(help="Schemas: lines, or a folder; default: benchmarks/schemas.jsonl.", show_default=False)
    ] = SCHEMAS,
    num_schemas: Annotated[int | None, typer.Option(help="Schemas that can be answered; default: all.")] = None,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: Annotated[int, typer.Option(help="Prompts that are answered too, each with --prompts-schema.")] = 0,
    prompts_schema: Annotated[str, typer.Option(help="Name of a shipped schema.")] = "tool_search",
    max_tokens: MaxTokens = 512,
    near_tie: Annotated[float, typer.Option(help="Margin below which two tokens are a tie.")] = 1e-3,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    tree_budget: Annotated[int, typer.Option(help="Drafted nodes of each tree; with --speed as many as pay.")] = 15,
    speed: Annotated[bool, typer.Option("--speed", help="One answer at a time, timed, and plain text too.")] = False,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/structured.json"),
) -> int:
    """Returns 1 if a divergence is no near-tie or a finished answer is not valid."""
    llm = load_llm(bundle, threads, prefix_reuse=not speed)
    walking = [name for name, plan in llm.runtime.methods.items() if VERIFIERS[plan.verification].merges]
    chosen = walking if methods == ["all"] else methods_of(llm, methods or llm.methods[:1])
    if not speed:
        llm.runtime.fix_budget(tree_budget)
    plan = Plan(
        bundle, schemas, num_schemas, prompts, num_prompts, prompts_schema, max_tokens, near_tie, concurrency,
        tree_budget, speed, output,
    )  # fmt: skip
    report = verify(llm, plan, chosen)
    texts_table(report).show(console)
    if speed:
        speed_table(report).show(console)
    failures = sum(row["failures"] for row in report["texts"])
    console.print(f"{failures} failures, {len(report['invalid'])} finished answers that are not valid")
    console.print(f"written to {output}")
    return int(failures + len(report["invalid"]) > 0)


if __name__ == "__main__":
    run(main)
