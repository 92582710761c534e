"""RSD's experiments 1 and 2 (section 4, appendix D.3): block efficiency of trees by draft length and by target budget.

    python -m studies.rsd.experiments --model MODEL --drafter DRAFTER --dataset spec_bench.jsonl

Builds one bundle with every method, answers the prompts with each of them at both of the paper's sampling settings, and
writes results.json, experiments.json and plots into --output. After Ctrl-C the same command goes on; only the cell that
was running is lost. Block efficiency does not depend on the machine's load; with --timing, which wants a quiet machine,
the same command measures token rates instead, one stream at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console
from safetensors import safe_open

from benchmarks.load.workload import MT_BENCH, ChatTokenizer
from benchmarks.speed.inprocess import load_llm
from redraft.bundle.manifest import Bundle
from redraft.compiler.draft_model import is_model
from redraft.console.interrupt import interruptible
from redraft.console.progress import progress
from redraft.errors import BundleError
from redraft.llm import Answer
from redraft.model_defs.files import weight_files
from redraft.prompts import Prompt, load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, Options, request
from studies.rsd import report as rsd_report
from studies.rsd.shapes import ALGORITHMS, EXPERIMENTS, Experiment, Shape, methods_toml, shapes_of
from studies.rsd.store import Row, Store

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
BASELINE_ROUNDS = 4
"""Answers of auto-regressive sampling to each prompt: what the quality of all others is compared with."""
WARM_UP_TOKENS = 8
console = Console()


@dataclass(frozen=True)
class Setting:
    """How tokens are sampled, and on which of Spec-Bench's tasks."""

    temperature: float
    top_p: float | None
    tasks: tuple[str, ...]

    @property
    def name(self) -> str:
        """The temperature, as results and plots call it."""
        return f"{self.temperature:g}"

    @property
    def sampling(self) -> dict[str, float]:
        """The setting as fields of a request."""
        return {"temperature": self.temperature} | ({} if self.top_p is None else {"top_p": self.top_p})


SETTINGS = (Setting(0.3, None, ("translation", "summarization")), Setting(1.0, 0.95, ("mt_bench", "qa")))
"""The paper's, with Spec-Bench's nearest tasks: WMT and XSum; Dolly."""


class Answering(Protocol):
    """What answers requests: a `redraft.llm.LLM`."""

    def run(self, requests: Sequence[GenerateRequest], concurrency: int = 1) -> list[Answer]: ...


def seed(method: str, prompt: Prompt, round_: int) -> int:
    """A request's own seed, whatever else is measured beside it."""
    return zlib.crc32(f"{method}/{prompt.question_id}/{round_}".encode())


def measure(
    llm: Answering,
    store: Store,
    cells: list[tuple[Setting, str]],
    prompts: dict[str, list[Prompt]],
    asked: Callable[[Setting, str, Prompt, int], GenerateRequest],
    concurrency: int,
) -> None:
    """Answer the prompts of each setting and method that is not in the store yet; each is kept when it is whole."""
    with progress("answers", len(cells), "cells", console=console) as shown:
        for setting, method in cells:
            shown.update(shown.done, f"{method}, temperature {setting.name}")
            if not store.has(setting.name, method):
                rounds = BASELINE_ROUNDS if method == AUTO_REGRESSIVE else 1
                pairs = list(product(prompts[setting.name], range(rounds)))
                requests = [asked(setting, method, prompt, round_) for prompt, round_ in pairs]
                answers = llm.run(requests, concurrency)
                rows = [Row.of(prompt, answer) for (prompt, _), answer in zip(pairs, answers, strict=True)]
                store.add(setting.name, method, rows)
            shown.advance()


def measure_rates(
    llm: Answering,
    store: Store,
    cells: list[tuple[Setting, str]],
    prompts: dict[str, list[Prompt]],
    asked: Callable[[Setting, str, Prompt, int], GenerateRequest],
) -> None:
    """Seconds of each method on each prompt, one stream: methods take turns, in alternating order, prompt by prompt."""
    left = [
        (setting, method, prompt, place)
        for setting in {setting: None for setting, _ in cells}
        for place, prompt in enumerate(prompts[setting.name])
        for method in [method for other, method in cells if other == setting][:: 1 if place % 2 == 0 else -1]
    ]
    warm = set[tuple[str, str]]()
    with progress("token rates", len(left), "answers", console=console) as shown:
        for setting, method, prompt, _ in left:
            shown.update(shown.done, f"{method}, temperature {setting.name}")
            seconds = store.timing.setdefault(setting.name, {}).setdefault(method, {})
            if prompt.question_id not in seconds:
                wanted = asked(setting, method, prompt, 0)
                if (setting.name, method) not in warm:
                    warm.add((setting.name, method))
                    llm.run([wanted.model_copy(update={"max_tokens": WARM_UP_TOKENS})])
                (answer,) = llm.run([wanted])
                if len(answer.token_ids) > 1:
                    seconds[prompt.question_id] = len(answer.token_ids) - 1, answer.stats.decode_ms / 1e3
                    store.save()
            shown.advance()


def parameters(model: Path, drafter: Path) -> tuple[int, int]:
    """Weights that the target reads in a step, and the drafter for a level: its own and the LM head's hot rows, or all
    of a model's that drafts.

    Raises ValueError where the folders hold no such models.
    """
    try:
        target = sum(_sizes(path)[0] for path in weight_files(model))
        if is_model(drafter):
            return target, sum(_sizes(path)[0] for path in weight_files(drafter))
        own, has_head = _sizes(drafter / "drafter.safetensors")
        card = json.loads((drafter / "config.json").read_text())
        rows = card.get("hot_vocabulary") or card["vocab_size"]
        return target, own + (0 if has_head else rows * card["hidden_size"])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"the sizes of --model {model} and --drafter {drafter} cannot be read: {error}") from None


def _sizes(path: Path) -> tuple[int, bool]:
    """Numbers in a file's floating-point tensors, and whether one of them is a drafter's own LM head."""
    with safe_open(str(path), "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        weights = {name: part for name, part in slices.items() if "F" in part.get_dtype()}
        return sum(math.prod(part.get_shape()) for part in weights.values()), "own_head.weight" in weights


def build_bundle(args: argparse.Namespace, shapes: list[Shape]) -> Path:
    """A bundle with all of the shapes as its methods; one that is there is taken. Raises RuntimeError."""
    folder = args.bundle or args.engines / f"rsd-{args.drafter.name}-{args.precision}"
    wanted = {shape.method for shape in shapes}
    if args.bundle or (folder / "manifest.json").is_file():
        missing = wanted - set(Bundle.load(folder).config.methods)
        if not missing:
            return folder
        if args.bundle:
            known = f"write them with --write-methods, and build them with redraft build --max-tree {_rows(shapes)}"
            raise RuntimeError(f"--bundle {folder} lacks the methods {', '.join(sorted(missing))}; {known}")
    every = shapes_of(list(EXPERIMENTS.values()))
    methods = args.output / "methods.toml"
    methods.parent.mkdir(parents=True, exist_ok=True)
    methods.write_text(methods_toml(every, str(args.drafter), args.support), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).parents[2] / "build" / "build_engines.py")]
    command += ["--model", str(args.model), "--methods", str(methods), "--output", str(folder)]
    command += ["--precision", args.precision, "--slots", str(args.slots), "--max-tree", str(_rows(every))]
    if subprocess.run(command).returncode:
        raise RuntimeError(f"the bundle {folder} could not be built, see above")
    return folder


def _rows(shapes: list[Shape]) -> int:
    """Rows of the largest tree, root included."""
    return 1 + max(shape.nodes for shape in shapes)


def pick_prompts(path: Path, setting: Setting, count: int) -> list[Prompt]:
    """The same number of prompts of each of the setting's tasks. Raises ValueError where the file lacks a task, and
    what `load_prompts` raises."""
    prompts, chosen = load_prompts(path), list[Prompt]()
    for place, task in enumerate(setting.tasks):
        some = [prompt for prompt in prompts if prompt.category in (MT_BENCH if task == "mt_bench" else (task,))]
        if not some:
            raise ValueError(f"{path} has no prompts of the task {task}, expected Spec-Bench's file or other --tasks")
        chosen += spread(some, (count + place) // len(setting.tasks))
    return chosen


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """The settings that the flags ask for."""
    chosen = [setting for setting in SETTINGS if setting.temperature in args.temperature]
    return [Setting(s.temperature, s.top_p, tuple(args.tasks) if args.tasks else s.tasks) for s in chosen]


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=Path("artifacts/models/SmolLM2-135M-Instruct"), help="the target")
    add("--drafter", type=Path, default=Path("drafters/SmolLM2-135M-Instruct"), help="or a model as draft LM")
    add("--dataset", type=Path, required=True, help="Spec-Bench's question.jsonl, or a file like it")
    add("--bundle", type=Path, help="a bundle that has the methods; default: built in --engines where it is not there")
    add("--engines", type=Path, default=Path("artifacts/engines"))
    add("--precision", default="bf16", choices=("fp32", "bf16", "int8"))
    add("--slots", type=int, help="of the bundle; default: one a prompt and one an answer at a time, so that "
        "every prompt is prefilled once")  # fmt: skip
    add("--support", type=int, default=64, help="most likely tokens that random draws are from")
    add("--experiments", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    add("--cells", type=int, nargs="+", help="draft lengths and budgets, such as 4 21; default: all")
    add("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    add("--temperature", type=float, nargs="+", default=[s.temperature for s in SETTINGS],
        choices=[s.temperature for s in SETTINGS], help="1 has top-p 0.95")  # fmt: skip
    add("--tasks", nargs="+", choices=TASKS, help="default: translation and summarization at temperature 0.3, "
        "mt_bench and qa at 1")  # fmt: skip
    add("--num-prompts", type=int, default=20, help="at each temperature, spread evenly over the tasks")
    add("--max-tokens", type=int, default=64)
    add("--concurrency", type=int, default=8, help="answers at a time; block efficiency does not depend on it")
    add("--threads", type=int)
    add("--timing", action="store_true", help="measure token rates, one stream; wants a quiet machine")
    add("--timing-prompts", type=int, default=12, help="of those at each temperature")
    add("--report-only", action="store_true", help="tables and plots of what is there")
    add("--write-methods", type=Path, metavar="FILE", help="write all methods for redraft build --methods, and end")
    add("--output", type=Path, default=Path("artifacts/reports/rsd"))
    args = parser.parse_args(argv)
    args.slots = args.num_prompts + args.concurrency if args.slots is None else args.slots
    for name in ("slots", "support", "num_prompts", "max_tokens", "concurrency", "timing_prompts"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    known = {cell for name in args.experiments for cell in EXPERIMENTS[name].cells}
    if unknown := sorted(set(args.cells or ()) - known):
        parser.error(f"--cells {' '.join(map(str, unknown))}: expected some of {' '.join(map(str, sorted(known)))}")
    return parser, args


@interruptible("rsd_experiments", "what was measured is kept; the same command goes on")
def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON, tables and plots."""
    parser, args = parse(argv)
    if args.write_methods:
        text = methods_toml(shapes_of(list(EXPERIMENTS.values())), str(args.drafter), args.support)
        args.write_methods.write_text(text, encoding="utf-8")
        return 0
    experiments: list[Experiment] = [EXPERIMENTS[name] for name in args.experiments]
    shapes = [shape for shape in shapes_of(experiments, args.cells) if shape.algorithm in args.algorithms]
    settings = settings_of(args)
    try:
        prompts = {setting.name: pick_prompts(args.dataset, setting, args.num_prompts) for setting in settings}
        target, draft = parameters(args.model, args.drafter)
        parts = {setting.name: part_of(setting, prompts[setting.name]) for setting in settings}
        store = Store.open(args.output / "results.json", setup_of(args, target, draft), parts)
        folder = None if args.report_only else build_bundle(args, shapes)
    except (ValueError, OSError, RuntimeError, BundleError) as error:
        parser.error(str(error))
    if folder is not None:
        llm = load_llm(parser, folder, args.threads, prefix_reuse=not args.timing)
        tokenizer = ChatTokenizer(folder)

        def asked(setting: Setting, method: str, prompt: Prompt, round_: int) -> GenerateRequest:
            options = cast(Options, setting.sampling | {"seed": seed(method, prompt, round_), "method": method})
            return request(tokenizer.chat(prompt.turns[0]), args.max_tokens, **options)

        methods = [AUTO_REGRESSIVE, *(shape.method for shape in shapes)]
        cells = [(setting, method) for setting in settings for method in methods]
        if args.timing:
            few = {name: spread(some, args.timing_prompts) for name, some in prompts.items()}
            measure_rates(llm, store, cells, few, asked)
        else:
            measure(llm, store, cells, prompts, asked, min(args.concurrency, args.slots))
    references = {
        prompt.question_id: prompt.references[0]
        for some in prompts.values()
        for prompt in some
        if prompt.category not in MT_BENCH and prompt.references and prompt.references[0]
    }
    for path in rsd_report.write(store, experiments, references, args.output, console):
        console.print(f"written: {path}")
    return 0


def setup_of(args: argparse.Namespace, target: int, draft: int) -> dict[str, Any]:
    """What all figures depend on."""
    return {
        "model": args.model.name,
        "drafter": args.drafter.name,
        "precision": args.precision,
        "support": args.support,
        "max_tokens": args.max_tokens,
        "target_parameters": target,
        "draft_parameters": draft,
    }


def part_of(setting: Setting, prompts: list[Prompt]) -> dict[str, Any]:
    """What the figures of a setting depend on."""
    return {
        "sampling": setting.sampling,
        "tasks": list(setting.tasks),
        "prompts": [prompt.question_id for prompt in prompts],
    }


if __name__ == "__main__":
    sys.exit(main())
