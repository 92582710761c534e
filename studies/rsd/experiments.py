"""RSD's experiments 1 and 2 (section 4, appendix D.3): block efficiency of trees by draft length and by target budget.

    python -m studies.rsd.experiments --model MODEL --drafter DRAFTER --prompts spec_bench.jsonl

Builds one bundle with every method, answers the prompts with each of them at both of the paper's sampling settings, and
writes results.json, experiments.json and plots into --output. After Ctrl-C the same command goes on; only the cell that
was running is lost. Block efficiency does not depend on the machine's load; with --timing, which wants a quiet machine,
the same command measures token rates instead, one stream at a time.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import safe_open

from benchmarks.command import MaxTokens, ModelFolder, console, run
from benchmarks.load.comparison import MT_BENCH
from benchmarks.speed.inprocess import load_llm
from redraft.bundle.backends import Precision
from redraft.bundle.manifest import Bundle
from redraft.compiler.draft_model import is_model
from redraft.console.interrupt import interruptible
from redraft.console.progress import progress
from redraft.errors import BundleError
from redraft.llm import LLM
from redraft.loadtest.workload import ChatTokenizer
from redraft.model_defs.weights.folder import count_numbers
from redraft.prompts import Prompt, load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from studies.rsd import report as rsd_report
from studies.rsd.shapes import EXPERIMENTS, methods_toml, shapes_of
from studies.rsd.store import Row, Store

BASELINE_ROUNDS = 4
"""Answers of auto-regressive sampling to each prompt."""
WARM_UP_TOKENS, TIMED_PROMPTS = 8, 12
SUPPORT = 64
"""Most likely tokens that random draws are from."""


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


def seed(method: str, prompt: Prompt, round_: int) -> int:
    """A request's own seed, whatever else is measured beside it."""
    return zlib.crc32(f"{method}/{prompt.question_id}/{round_}".encode())


def measure(
    llm: LLM,
    store: Store,
    cells: list[tuple[Setting, str]],
    prompts: dict[str, list[Prompt]],
    asked: Callable[[Setting, str, Prompt, int], GenerateRequest],
    concurrency: int,
) -> None:
    """Answer the prompts of each setting and method that is not in the store yet; each is kept when it is whole."""
    with progress("answers", len(cells), "cells", console=console) as bar:
        for setting, method in cells:
            bar.update(bar.done, f"{method}, temperature {setting.name}")
            if not store.has(setting.name, method):
                rounds = BASELINE_ROUNDS if method == AUTO_REGRESSIVE else 1
                pairs = list(product(prompts[setting.name], range(rounds)))
                requests = [asked(setting, method, prompt, round_) for prompt, round_ in pairs]
                answers = llm.run(requests, concurrency)
                rows = [Row.of(prompt, answer) for (prompt, _), answer in zip(pairs, answers, strict=True)]
                store.add(setting.name, method, rows)
            bar.advance()


def measure_rates(
    llm: LLM,
    store: Store,
    cells: list[tuple[Setting, str]],
    prompts: dict[str, list[Prompt]],
    asked: Callable[[Setting, str, Prompt, int], GenerateRequest],
) -> None:
    """Seconds of each method on each prompt, one stream: methods take turns, in alternating order, prompt by prompt."""
    left = [
        (setting, method, prompt, index)
        for setting in {setting: None for setting, _ in cells}
        for index, prompt in enumerate(prompts[setting.name])
        for method in [method for other, method in cells if other == setting][:: 1 if index % 2 == 0 else -1]
    ]
    warm = set[tuple[str, str]]()
    with progress("token rates", len(left), "answers", console=console) as bar:
        for setting, method, prompt, _ in left:
            bar.update(bar.done, f"{method}, temperature {setting.name}")
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
            bar.advance()


def parameters(model: Path, drafter: Path) -> tuple[int, int]:
    """Weights that the target reads in a step, and the drafter for a level: its own and the LM head's hot rows, or all
    of a model's that drafts.

    Raises ValueError where the folders hold no such models.
    """
    try:
        target = count_numbers(model)
        if is_model(drafter):
            return target, count_numbers(drafter)
        sizes, has_head = _sizes(drafter / "drafter.safetensors")
        card = json.loads((drafter / "config.json").read_text())
        rows = card.get("hot_vocabulary") or card["vocab_size"]
        return target, sizes + (0 if has_head else rows * card["hidden_size"])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"the sizes of --model {model} and --drafter {drafter} cannot be read: {error}") from None


def _sizes(path: Path) -> tuple[int, bool]:
    """Numbers in a file's floating-point tensors, and whether one of them is a drafter's own LM head."""
    with safe_open(str(path), "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        weights = {name: part for name, part in slices.items() if "F" in part.get_dtype()}
        return sum(math.prod(part.get_shape()) for part in weights.values()), "own_head.weight" in weights


def build_bundle(model: Path, drafter: Path, precision: str, slots: int, engines: Path, output: Path) -> Path:
    """Build a bundle whose methods are all shapes, or take the one that is there. Raises typer.BadParameter."""
    folder, shapes = engines / f"rsd-{drafter.name}-{precision}", shapes_of(list(EXPERIMENTS.values()))
    names = {shape.method for shape in shapes}
    if (folder / "manifest.json").is_file() and names <= set(Bundle.load(folder).config.methods):
        return folder
    methods = output / "methods.toml"
    methods.parent.mkdir(parents=True, exist_ok=True)
    methods.write_text(methods_toml(shapes, str(drafter), SUPPORT), encoding="utf-8")
    command = [sys.executable, "-m", "redraft", "build", "--model", str(model), "--methods", str(methods)]
    command += ["--output", str(folder), "--precision", precision, "--slots", str(slots)]
    if subprocess.run([*command, "--max-tree", str(1 + max(shape.nodes for shape in shapes))]).returncode:
        raise typer.BadParameter(f"the bundle {folder} could not be built, see above")
    return folder


def pick_prompts(path: Path, setting: Setting, count: int) -> list[Prompt]:
    """Pick the same number of prompts of each of the setting's tasks. Raises ValueError where the file lacks a task,
    and what `load_prompts` raises."""
    prompts, chosen = load_prompts(path), list[Prompt]()
    for index, task in enumerate(setting.tasks):
        categories = MT_BENCH if task == "mt_bench" else (task,)
        if not (matching := [prompt for prompt in prompts if prompt.category in categories]):
            raise ValueError(f"{path} has no prompts of the task {task}, expected Spec-Bench's file")
        chosen += spread(matching, (count + index) // len(setting.tasks))
    return chosen


@interruptible("rsd_experiments", "what was measured is kept; the same command goes on")
def main(
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Spec-Bench's question.jsonl, or a file like it.")],
    model: ModelFolder = Path("artifacts/models/SmolLM2-135M-Instruct"),
    drafter: Annotated[Path, typer.Option(metavar="FOLDER", help="A drafter, or a model as draft LM.")] = Path(
        "drafters/SmolLM2-135M-Instruct"
    ),
    engines: Annotated[Path, typer.Option("--bundles", help="Folder of bundles.")] = Path("artifacts/engines"),
    precision: Annotated[Precision, typer.Option(help="Stored weights of the bundle.")] = Precision.bf16,
    slots: Annotated[
        int | None, typer.Option(help="Slots of the bundle; default: one a prompt and one an answer at a time.")
    ] = None,
    experiments: Annotated[list[str], typer.Option(help="Experiments: exp1 (draft length), exp2 (budget).")] = list(
        EXPERIMENTS
    ),
    temperature: Annotated[list[float], typer.Option(help="Temperatures of the requests; 1 has top-p 0.95.")] = [
        s.temperature for s in SETTINGS
    ],
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts at each temperature, spread evenly over the tasks.")
    ] = 20,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 8,
    timing: Annotated[bool, typer.Option("--timing", help="Measure token rates, one stream.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("artifacts/reports/rsd"),
) -> None:
    chosen = [EXPERIMENTS[name] for name in experiments]
    settings = [setting for setting in SETTINGS if setting.temperature in temperature]
    slots = slots or num_prompts + concurrency
    try:
        picked = {setting.name: pick_prompts(prompts, setting, num_prompts) for setting in settings}
        target, draft = parameters(model, drafter)
        setup = {"model": model.name, "drafter": drafter.name, "precision": precision, "support": SUPPORT}
        setup |= {"max_tokens": max_tokens, "target_parameters": target, "draft_parameters": draft}
        parts = {setting.name: part_of(setting, picked[setting.name]) for setting in settings}
        store = Store.open(output / "results.json", setup, parts)
        folder = build_bundle(model, drafter, precision, slots, engines, output)
    except (ValueError, OSError, BundleError) as error:
        raise typer.BadParameter(str(error)) from None
    llm, tokenizer = load_llm(folder, prefix_reuse=not timing), ChatTokenizer(folder)

    def asked(setting: Setting, method: str, prompt: Prompt, round_: int) -> GenerateRequest:
        options: dict[str, Any] = setting.sampling | {"seed": seed(method, prompt, round_), "method": method}
        return tokenizer.request(prompt.turns[0], max_tokens, **options)

    methods = [AUTO_REGRESSIVE, *(shape.method for shape in shapes_of(chosen))]
    cells = [(setting, method) for setting in settings for method in methods]
    if timing:
        timed = {name: spread(group, TIMED_PROMPTS) for name, group in picked.items()}
        measure_rates(llm, store, cells, timed, asked)
    else:
        measure(llm, store, cells, picked, asked, min(concurrency, slots))
    for path in rsd_report.write(store, chosen, output, console):
        console.print(f"written: {path}")


def part_of(setting: Setting, prompts: list[Prompt]) -> dict[str, Any]:
    """What the figures of a setting depend on."""
    questions = [prompt.question_id for prompt in prompts]
    return {"sampling": setting.sampling, "tasks": list(setting.tasks), "prompts": questions}


if __name__ == "__main__":
    run(main)
