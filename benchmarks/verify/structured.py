"""Checks that speculation changes no structured answer, that every finished one is valid, and what grammars cost.

    python -m benchmarks.verify.structured --bundle BUNDLE
    python -m benchmarks.verify.structured --bundle BUNDLE --schemas schemas.jsonl --num-schemas 200 --num-prompts 80
    python -m benchmarks.verify.structured --bundle BUNDLE --methods --num-schemas 20 --num-prompts 8
    python -m benchmarks.verify.structured --bundle BUNDLE --speed --num-schemas 0 --num-prompts 20

The default method of a bundle against auto-regressive decoding with the same masks, greedy and seeded: each schema with
its own prompt, then --num-prompts prompts of a data set with the schema --prompts-schema. --methods takes names of
methods; without any, it is every method that verifies by a walk.
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

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jsonschema import Draft202012Validator
from rich.console import Console

from benchmarks.figures.results import save_report, write_json
from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import load_llm
from benchmarks.verify.lossless import first_difference, margin_at
from redraft.bundle.budget import BudgetTable
from redraft.bundle.manifest import MANIFEST, file_sha256
from redraft.console.progress import progress
from redraft.decoding.verification import VERIFIERS
from redraft.grammar.state import GrammarState
from redraft.llm import LLM, Answer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, Guide, InvalidRequest, request

HERE = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7}}
ASK = "{prompt}\n\nAnswer with JSON by this JSON schema, and nothing else:\n{schema}"
EXAMPLE = "Write an example of what the schema describes."
PLAIN_TOKENS = 128
"""Most tokens of an answer without a grammar."""
DRAFTERS = ("recurrent", "hidden_state", "eagle", "medusa", "draft_lm")
GRAMMAR_CALLS = ("mask", "advance", "forced")
console = Console()


@dataclass(frozen=True)
class Case:
    """A prompt and the schema of its answer."""

    name: str
    prompt: str
    schema: Any

    def request(self, tokenizer: ChatTokenizer, setting: str, max_tokens: int, guided: bool) -> GenerateRequest:
        """The prompt with the schema and its guide, or by itself."""
        if not guided:
            return request(tokenizer.chat(self.prompt), min(max_tokens, PLAIN_TOKENS), **SETTINGS[setting])
        schema = json.dumps(self.schema, ensure_ascii=False)
        text = tokenizer.chat(ASK.format(prompt=self.prompt, schema=schema))
        return request(text, max_tokens, **SETTINGS[setting], guide=Guide(kind="json_schema", text=schema))


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
    found, refused = [], {}
    for case in cases:
        started, asked = time.perf_counter(), case.request(tokenizer, "greedy", max_tokens, guided=True)
        try:
            llm.runtime.sequence(0, asked)
            found.append(case)
        except InvalidRequest as error:
            seconds, by_schema = time.perf_counter() - started, str(error).startswith("guide")
            refused[case.name] = {"error": str(error), "seconds": round(seconds, 3), "schema": by_schema}
    return found, refused


def run_cases(
    llm: LLM, cases: Sequence[tuple[Case, str]], methods: Sequence[str], args: argparse.Namespace
) -> list[Run]:
    """All methods' runs of cases, each in a setting, auto-regressive decoding first; --speed: one at a time, timed,
    and without a guide too."""
    tokenizer = ChatTokenizer(args.bundle)
    asked = [
        (case, setting, one.model_copy(update={"method": method}))
        for case, setting in cases
        for guided in (True, False)[: 1 + args.speed]
        for one in [case.request(tokenizer, setting, args.max_tokens, guided)]
        for method in (AUTO_REGRESSIVE, *methods)
    ]
    answers, grammar_ms = list[Answer](), list[float | None]()
    if args.speed:
        for _, _, one in asked:
            clock = GrammarClock()
            with clock.running():
                answers += llm.run([one])
            grammar_ms.append(1e3 * clock.seconds)
    else:
        answers, grammar_ms = llm.run([one for _, _, one in asked], args.concurrency), [None] * len(asked)
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
                decode_ms=stats.decode_ms if args.speed else None, grammar_ms=spent, margin=margin,
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


def verify(llm: LLM, args: argparse.Namespace, methods: Sequence[str]) -> dict[str, Any]:
    """All cases in all settings; the report, written to `args.output` as it grows, its runs beside it."""
    cases, refused = usable(llm, load_schemas(args.schemas), ChatTokenizer(args.bundle), args.max_tokens)
    cases = spread(cases, args.num_schemas)
    schemas = len(cases)
    if args.num_prompts:
        (schema,) = [case.schema for case in load_schemas(HERE / "schemas.jsonl") if case.name == args.prompts_schema]
        prompts = spread(load_prompts(args.dataset), args.num_prompts)
        cases += [Case(f"prompt {prompt.question_id}", prompt.turns[0], schema) for prompt in prompts]
    inputs = {
        "bundle": args.bundle.name, "manifest": file_sha256(args.bundle / MANIFEST), "schemas": schemas,
        "prompts": args.num_prompts, "max_tokens": args.max_tokens, "methods": [*methods], "speed": args.speed,
        "tree_budget": None if args.speed else args.tree_budget,
    }  # fmt: skip
    kept, runs = args.output.with_suffix(".runs.json"), list[Run]()
    earlier = json.loads(kept.read_bytes()) if kept.exists() else {}
    if earlier.get("inputs") == json.loads(json.dumps(inputs)):
        runs = [Run(**run) for run in earlier["runs"]]
    done = {(run.case, run.setting) for run in runs}
    left = [(case, setting) for case in cases for setting in SETTINGS if (case.name, setting) not in done]
    report = summary(inputs, refused, runs, args)
    with progress("verifying", len(left), "answers", console=console) as shown:
        for start in range(0, len(left), 2 * args.concurrency):
            part = left[start : start + 2 * args.concurrency]
            runs += run_cases(llm, part, methods, args)
            write_json(kept, {"inputs": inputs, "runs": [asdict(run) for run in runs]})
            report = summary(inputs, refused, runs, args)
            save_report(args.output, report)
            shown.advance(len(part))
    return report


def summary(
    inputs: dict[str, Any], refused: dict[str, dict[str, Any]], runs: Sequence[Run], args: argparse.Namespace
) -> dict[str, Any]:
    """What the runs show: counts of texts, and speed over auto-regressive decoding with and without grammars."""
    reasons = [one for one in refused.values() if one["schema"]]
    report: dict[str, Any] = {
        **inputs,
        "refused": len(reasons),
        "slowest_refusal_s": max((one["seconds"] for one in reasons), default=0.0),
        "too_long": len(refused) - len(reasons),
        "texts": [],
        "speed": [],
        "differences": [asdict(run) for run in runs if run.margin is not None],
        "invalid": [asdict(run) for run in runs if run.valid is False],
        "refusals": refused,
    }
    groups: dict[tuple[str, str, bool], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.setting, run.guided), []).append(run)
    for (method, setting, guided), rows in groups.items():
        named = {"method": method, "setting": setting}
        steps = max(sum(run.steps for run in rows), 1)
        per_step = (steps + sum(run.accepted for run in rows)) / steps
        if guided:
            ties = Counter(run.margin < args.near_tie for run in rows if run.margin is not None)
            counts = {
                "answers": len(rows),
                "finished": sum(run.finish == "stop" for run in rows),
                "valid": sum(run.valid is True for run in rows),
            }
            same = {"near_ties": ties[True], "failures": ties[False], "tokens_per_step": per_step}
            report["texts"].append(named | counts | same)
        if args.speed:
            base = groups[AUTO_REGRESSIVE, setting, guided]
            rate, base_rate = (
                1e3 * sum(run.tokens for run in some) / sum(run.decode_ms or 0 for run in some) for some in (rows, base)
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


def methods_table(report: dict[str, Any]) -> Table:
    """Tokens per step, greedy and seeded, by construction and drafter, of methods named as in lossless.toml."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in report["texts"]:
        drafter = next((name for name in DRAFTERS if row["method"].startswith(f"{name}_")), "none")
        construction = row["method"].removeprefix(f"{drafter}_")
        found.setdefault(construction, {}).setdefault(drafter, []).append(f"{row['tokens_per_step']:.2f}")
    columns = [*DRAFTERS, "none"]
    rows = [[name, *(" / ".join(cells.get(column, "-")) for column in columns)] for name, cells in found.items()]
    return Table("Tokens per step, greedy / seeded", ["construction", *columns], rows)


def speed_table(report: dict[str, Any]) -> Table:
    """What drafts are worth with a grammar, and to plain text."""
    names = ["method", "setting", "answers", "tokens/step", "grammar ms/step", "tokens/s", "speed-up"]
    table = Table("Acceptance and speed", names)
    for row in report["speed"]:
        figures = [f"{row['tokens_per_step']:.2f}", f"{row['grammar_ms_per_step']:.2f}"]
        figures += [f"{row['tokens_per_s']:.0f}", f"{row['speedup']:.2f}x"]
        table.rows.append([row["method"], row["setting"], "JSON" if row["grammar"] else "text", *figures])
    return table


def main(argv: list[str] | None = None) -> int:
    """Verify; the exit status is 1 if a divergence is no near-tie or a finished answer is not valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True)
    add("--threads", type=int)
    add("--schemas", type=Path, default=HERE / "schemas.jsonl")
    add("--num-schemas", type=int, help="so many of those that can be answered, spread evenly (default: all)")
    add("--methods", nargs="*", help="methods of the bundle (default: its first; no name: all that walk)")
    add("--dataset", type=Path, default=HERE / "prompts.jsonl")
    add("--num-prompts", type=int, default=0, help="so many prompts of --dataset too, all with --prompts-schema")
    add("--prompts-schema", default="tool_search", help="name of a schema of benchmarks/schemas.jsonl")
    add("--max-tokens", type=int, default=512)
    add("--near-tie", type=float, default=1e-3)
    add("--concurrency", type=int, default=8, help="answers at a time")
    add("--tree-budget", type=int, default=15, help="draft so much whatever runs; with --speed as the bundle is tuned")
    add("--speed", action="store_true", help="one answer at a time, timed, and plain text too")
    add("--output", type=Path, default=Path("artifacts/reports/structured.json"))
    args = parser.parse_args(argv)
    llm = load_llm(parser, args.bundle, args.threads, prefix_reuse=not args.speed)
    walking = [name for name, plan in llm.runtime.plans.items() if VERIFIERS[plan.verification].merges]
    methods = llm.methods[:1] if args.methods is None else args.methods or walking
    if unknown := set(methods) - {*llm.methods}:
        parser.error(f"--methods: expected some of {', '.join(llm.methods)}, got {', '.join(sorted(unknown))}")
    if not args.speed:
        budget = BudgetTable.constant(args.tree_budget)
        plans = llm.runtime.plans.items()
        llm.runtime.with_plans({name: dataclasses.replace(plan, budget=budget) for name, plan in plans})
    report = verify(llm, args, methods)
    texts_table(report).show(console)
    if args.speed:
        speed_table(report).show(console)
    failures = sum(row["failures"] for row in report["texts"])
    console.print(f"{failures} failures, {len(report['invalid'])} finished answers that are not valid")
    console.print(f"written to {args.output}")
    return int(failures + len(report["invalid"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
