"""Checks that speculation changes no structured answer, that every finished one is valid, and what grammars cost.

    python -m benchmarks.verify.structured --bundle BUNDLE
    python -m benchmarks.verify.structured --bundle BUNDLE --schemas data --num-schemas 200 --num-prompts 80

The default method of a bundle (or some, --methods) against auto-regressive decoding with the same masks, greedy and
seeded: each schema with its own prompt, then --num-prompts prompts of a data set with the schema --prompts-schema.
Where two texts part, the target's margin between the two tokens is computed by teacher forcing: below --near-tie it is
listed, otherwise it is a failure. For comparison the same prompts are answered without a grammar, by fewer tokens.
`--schemas` is a file of lines {"name", "prompt", "schema"} or a folder of JSON schemas, such as JSONSchemaBench's
`data`; schemas that the library refuses are counted. What is done is kept in --output: the same command goes on where
it was cut short.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jsonschema import Draft202012Validator
from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import load_llm
from benchmarks.verify.lossless import first_difference, margin_at
from redraft.bundle.manifest import MANIFEST, file_sha256
from redraft.console.progress import progress
from redraft.grammar.state import GrammarState
from redraft.llm import LLM, Answer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, Guide, InvalidRequest, request

HERE = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7}}
ASK = "{prompt}\n\nAnswer with JSON by this JSON schema, and nothing else:\n{schema}"
PLAIN_TOKENS = 128
"""Most tokens of an answer without a grammar."""
GRAMMAR_CALLS = ("mask", "advance", "forced")
console = Console()


@dataclass(frozen=True)
class Case:
    """A prompt and the schema of its answer."""

    name: str
    prompt: str
    schema: Any


@dataclass
class Run:
    """One answer. `margin`: of the token at which it parts from auto-regressive decoding's, where it does."""

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
    decode_ms: float
    grammar_ms: float
    margin: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.case, self.setting


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
        ask = "Write an example of what the schema describes."
        files = sorted(path.rglob("*.json"))
        return [
            Case(file.relative_to(path).with_suffix("").as_posix(), ask, json.loads(file.read_text())) for file in files
        ]
    return [Case(**json.loads(line)) for line in path.read_text().splitlines()]


def requests_of(case: Case, tokenizer: ChatTokenizer, setting: str, max_tokens: int) -> tuple[GenerateRequest, ...]:
    """The case with its guide and without one."""
    schema = json.dumps(case.schema, ensure_ascii=False)
    text = tokenizer.chat(ASK.format(prompt=case.prompt, schema=schema))
    guided = request(text, max_tokens, **SETTINGS[setting], guide=Guide(kind="json_schema", text=schema))
    return guided, request(text, min(max_tokens, PLAIN_TOKENS), **SETTINGS[setting])


def answer(llm: LLM, asked: GenerateRequest, method: str) -> tuple[Answer, float]:
    """The answer, and milliseconds that its grammar took."""
    clock = GrammarClock()
    with clock.running():
        (found,) = llm.run([asked.model_copy(update={"method": method})])
    return found, 1e3 * clock.seconds


def run_case(llm: LLM, case: Case, setting: str, methods: Sequence[str], args: argparse.Namespace) -> list[Run]:
    """Every method's run of a case, with and without its guide, auto-regressive decoding first."""
    runs = []
    for asked in requests_of(case, ChatTokenizer(args.bundle), setting, args.max_tokens):
        expected: Answer | None = None
        for method in (AUTO_REGRESSIVE, *methods):
            found, grammar_ms = answer(llm, asked, method)
            expected, stats = expected or found, found.stats
            margin, place = None, first_difference(expected.token_ids, found.token_ids)
            if place is not None and asked.guide is not None:
                margin = margin_between(llm, asked, expected, found, place)
            whole = asked.guide is not None and found.finish_reason == "stop"
            runs.append(
                Run(
                    case=case.name, setting=setting, method=method, guided=asked.guide is not None,
                    finish=found.finish_reason or "", valid=is_valid(found.text, case.schema) if whole else None,
                    tokens=stats.output_tokens, steps=stats.steps, drafted=stats.drafted, accepted=stats.accepted,
                    decode_ms=stats.decode_ms, grammar_ms=grammar_ms, margin=margin,
                )
            )  # fmt: skip
    return runs


def margin_between(llm: LLM, asked: GenerateRequest, expected: Answer, found: Answer, place: int) -> float:
    """See `margin_at`; infinite where one of the texts ends."""
    if place >= min(len(expected.token_ids), len(found.token_ids)):
        return float("inf")
    return margin_at(llm, asked, expected.token_ids, place, found.token_ids[place])


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema describes, by another implementation of JSON Schema."""
    try:
        return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(
            json.loads(text)
        )
    except ValueError:
        return False


def usable(llm: LLM, cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """The cases whose schema compiles, and why the others do not."""
    found, refused = [], {}
    for case in cases:
        try:
            llm.runtime.grammars.compile(Guide(kind="json_schema", text=json.dumps(case.schema, ensure_ascii=False)))
            found.append(case)
        except ValueError as error:
            refused[case.name] = str(error)
    return found, refused


def verify(llm: LLM, args: argparse.Namespace, methods: Sequence[str]) -> dict[str, Any]:
    """All cases in all settings; the report, written to `args.output` after each."""
    cases, refused = usable(llm, spread(load_schemas(args.schemas), args.num_schemas))
    if args.num_prompts:
        (schema,) = [case.schema for case in load_schemas(HERE / "schemas.jsonl") if case.name == args.prompts_schema]
        prompts = spread(load_prompts(args.dataset), args.num_prompts)
        cases += [Case(f"prompt {prompt.question_id}", prompt.turns[0], schema) for prompt in prompts]
    inputs = {"manifest": file_sha256(args.bundle / MANIFEST), "max_tokens": args.max_tokens, "methods": [*methods]}
    report: dict[str, Any] = {"inputs": inputs, "refused": refused, "runs": []}
    earlier = json.loads(args.output.read_bytes()) if args.output.exists() else {}
    if earlier.get("inputs") == json.loads(json.dumps(inputs)):
        report["runs"] = earlier["runs"]
    done = {(run["case"], run["setting"]) for run in report["runs"]}
    left = [(case, setting) for case in cases for setting in SETTINGS if (case.name, setting) not in done]
    with progress("verifying", len(left), "answers", console=console) as shown:
        for case, setting in left:
            shown.update(shown.done, f"{case.name}, {setting}")
            try:
                report["runs"] += [asdict(run) for run in run_case(llm, case, setting, methods, args)]
            except InvalidRequest as error:
                refused[case.name] = str(error)
            write_json(args.output, report)
            shown.advance()
    return report


def tables(report: dict[str, Any], near_tie: float) -> list[Table]:
    """The report as tables: texts, and speed over auto-regressive decoding with and without grammars."""
    runs = [Run(**{field.name: run[field.name] for field in fields(Run)}) for run in report["runs"]]
    texts = Table(f"Structured answers ({len(report['refused'])} schemas refused)",
                  ["method", "setting", "answers", "finished", "valid", "near-ties", "failures"])  # fmt: skip
    speed = Table(
        "Acceptance and speed",
        ["method", "setting", "grammar", "tokens/step", "grammar ms/step", "tokens/s", "speed-up"],
    )
    for method in dict.fromkeys(run.method for run in runs):
        for setting in SETTINGS:
            for guided in (True, False):
                rows = [run for run in runs if (run.method, run.setting, run.guided) == (method, setting, guided)]
                base = [
                    run for run in runs if (run.method, run.setting, run.guided) == (AUTO_REGRESSIVE, setting, guided)
                ]
                if rows:
                    cells = [method, setting, "yes" if guided else "no", *speed_cells(rows, base)]
                    speed.rows.append(cells)
                if rows and guided:
                    margins = [run.margin for run in rows if run.margin is not None]
                    ties = sum(margin < near_tie for margin in margins)
                    whole = [run for run in rows if run.finish == "stop"]
                    counts = [len(rows), len(whole), sum(bool(run.valid) for run in whole), ties, len(margins) - ties]
                    texts.rows.append([method, setting, *map(str, counts)])
    return [texts, speed]


def speed_cells(runs: Sequence[Run], base: Sequence[Run]) -> list[str]:
    """Tokens per step, grammar's milliseconds per step, tokens/s, and that over auto-regressive decoding's."""
    steps = sum(run.steps for run in runs)
    rates = [1e3 * sum(run.tokens for run in some) / sum(run.decode_ms for run in some) for some in (runs, base)]
    accepted = (steps + sum(run.accepted for run in runs)) / max(steps, 1)
    grammar = sum(run.grammar_ms for run in runs) / max(steps, 1)
    return [f"{accepted:.2f}", f"{grammar:.2f}", f"{rates[0]:.0f}", f"{rates[0] / rates[1]:.2f}"]


def main(argv: list[str] | None = None) -> int:
    """Verify; the exit status is 1 if a divergence is no near-tie or a finished answer is not valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True)
    add("--schemas", type=Path, default=HERE / "schemas.jsonl")
    add("--num-schemas", type=int, help="so many, spread evenly (default: all)")
    add("--methods", nargs="+", help="methods of the bundle (default: its first)")
    add("--dataset", type=Path, default=HERE / "prompts.jsonl")
    add("--num-prompts", type=int, default=0, help="so many prompts of --dataset too, all with --prompts-schema")
    add("--prompts-schema", default="tool_search", help="name of a schema of benchmarks/schemas.jsonl")
    add("--max-tokens", type=int, default=512)
    add("--near-tie", type=float, default=1e-3)
    add("--output", type=Path, default=Path("artifacts/reports/structured.json"))
    args = parser.parse_args(argv)
    llm = load_llm(parser, args.bundle)
    methods = args.methods or llm.methods[:1]
    if unknown := set(methods) - {*llm.methods}:
        parser.error(f"--methods: expected some of {', '.join(llm.methods)}, got {', '.join(sorted(unknown))}")
    report = verify(llm, args, methods)
    shown = tables(report, args.near_tie)
    for table in shown:
        table.show(console)
    failures = sum(int(row[-1]) for row in shown[0].rows)
    invalid = sum(run["valid"] is False for run in report["runs"])
    console.print(f"{failures} failures, {invalid} finished answers that are not valid; written to {args.output}")
    return int(failures + invalid > 0)


if __name__ == "__main__":
    sys.exit(main())
