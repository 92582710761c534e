"""The plan of a drafter: how many tokens of teacher data and how many training positions fit a time, by rates that were
measured on this machine."""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from redraft.chat import template_digest
from redraft.console.progress import duration
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.eagle3 import parse_layers
from redraft.model_defs.drafters.registry import DRAFTERS, RECURRENT
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target, give_layers
from redraft.model_defs.weights.folder import model_digest
from redraft.prompts import Prompt
from redraft.text import TextCodec
from redraft.training.conversations import Generator
from redraft.training.distillation import Labels, Trainer, make_optimizer
from redraft.training.forward import EngineForward
from redraft.training.parts import HELD_OUT_SHARE, LEAST_HELD_OUT, held_out_tokens
from redraft.training.prompts import prompts_digest
from redraft.training.ranks import ALONE, Ranks
from redraft.training.shards import Document, write_shard
from redraft.training.teacher_data import TeacherData
from redraft.whole_file import whole_file

PASSES = (1.0, 4.0)
"""Training positions for each token of teacher data, at least and at most: new text teaches more than a text again, up
to where writing it takes most of the time."""
ANSWERED = 0.8
"""About the share of teacher data that is answers, the rest being prompts: what can be trained on."""
MEASURED_PROMPTS = 100
"""Prompts whose text the training rate is measured on."""
TIMED_STEPS = 7
DOCUMENT_TOKENS = 96


class Plan(BaseModel):
    """What a drafter is trained with, and the measurements that this rests on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """Digest of the target."""
    prompts: str | None = None
    """Digest of the prompts; None, as that of the chat template, in plans that were made before both were stored"""
    chat_template: str | None = None
    kind: str | None = None
    """Kind of drafter; None in plans that were made before it was stored"""
    hours: float = Field(gt=0)
    teacher_rate: float
    """Tokens of teacher data per second."""
    training_rate: float
    """Training positions per second."""
    loading_s: float
    """What loading the target takes in each command."""
    tokens: int
    positions: int
    batch: int | None = None
    """Windows of a step; None, which is the drafter's, where that is enough for all ranks"""

    @classmethod
    def read(cls, path: Path) -> Plan | None:
        """The plan of a file, None where there is none. Raises ValueError for a damaged one."""
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError:
            raise ValueError(f"{path} is damaged: remove it, and the same command plans anew") from None

    def write(self, path: Path) -> None:
        """Store the plan, whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """The plan in words."""
        held_out = held_out_tokens(self.tokens)
        writing = (self.tokens + held_out) / self.teacher_rate + self.loading_s
        training = self.positions / self.training_rate + self.loading_s
        return [
            f"{self.tokens:,} tokens of teacher data and {held_out:,} held out to judge by: about {duration(writing)} "
            f"at {self.teacher_rate:,.0f} tokens/s",
            f"{self.positions:,} training positions: about {duration(training)} at "
            f"{self.training_rate:,.0f} positions/s",
        ]


def make_plan(model: str, hours: float, teacher_rate: float, training_rate: float, loading_s: float) -> Plan:
    """A plan whose teacher data and training take `hours` together: half of the time each, within the bounds of PASSES.

    Raises ValueError where the time is too short for anything.
    """
    seconds = 3600 * hours - 2 * loading_s
    held_out = LEAST_HELD_OUT / teacher_rate
    passes = min(max(training_rate / teacher_rate, PASSES[0]), PASSES[1]) * ANSWERED
    token_s = (1 + HELD_OUT_SHARE) / teacher_rate + passes / training_rate
    tokens = int((seconds - held_out) / token_s)
    if tokens < LEAST_HELD_OUT:
        least = math.ceil((2 * loading_s + held_out + LEAST_HELD_OUT * token_s) / 36) / 100
        raise ValueError(f"--hours {hours:g} is too short for this model on this machine: give at least {least:.2f}")
    return Plan(
        model=model,
        hours=hours,
        teacher_rate=round(teacher_rate, 1),
        training_rate=round(training_rate, 1),
        loading_s=round(loading_s, 1),
        tokens=tokens,
        positions=int(tokens * passes),
    )


def plan_training(
    path: Path,
    model: Path,
    engine: Path,
    teacher: Path,
    prompts: Sequence[Prompt],
    hours: float,
    say: Callable[[str], None],
    kind: str = RECURRENT,
    layers: str | None = None,
    ranks: Ranks = ALONE,
) -> Plan:
    """The plan that `path` holds, or a new one for another target or other hours, which is stored there: for drafters
    of a `kind` that read what enters `layers` of the target. All ranks measure at the same time. The first one reads
    and writes the plan.

    Raises ValueError where the hours are too few, where the plan is of another kind, a drafter has been trained by
    another plan or with fewer windows of a batch than there are ranks, or where the folders of the plan and of the
    `teacher` data are of other prompts or another chat template, OSError or ValueError for files.
    """
    digest = model_digest(model)
    inputs = {"prompts": prompts_digest(prompts), "chat_template": template_digest(model) or "", "kind": kind}
    there = None
    with ranks.agreement():
        there = _plan_there(path, digest, teacher, hours, inputs) if ranks.first else None
    plan = ranks.from_first(there)
    if plan:
        say(f"going on with {path}")
    else:
        say("measuring how fast teacher data are written and drafters trained")
        rates = ranks.gather(_measured_rates(model, engine, prompts, kind, layers, ranks))
        teacher_rates, loading, training_rates = zip(*rates, strict=True)
        with ranks.agreement():
            plan = make_plan(digest, hours, sum(teacher_rates), sum(training_rates), max(loading))
            plan = plan.model_copy(update=inputs)
    assert plan
    with ranks.agreement():
        plan = _for_ranks(plan, path, kind, ranks)
        if ranks.first and plan != there:
            plan.write(path)
    return plan


def _for_ranks(plan: Plan, path: Path, kind: str, ranks: Ranks) -> Plan:
    """A plan whose batch has a window for each rank. Raises ValueError where that is another batch than the one which
    the drafter beside its `path` is trained with."""
    batch = plan.batch or DRAFTERS[kind].recipe.batch
    if ranks.count <= batch:
        return plan
    if (path.parent / "checkpoint.safetensors").exists():
        raise ValueError(
            f"{path.parent} holds a drafter that is trained with batches of {batch} windows, one for each rank at "
            f"least: start at most {batch} ranks, or remove or rename it, and the same command trains one with "
            f"{ranks.count} ranks; teacher data are kept"
        )
    return plan.model_copy(update={"batch": ranks.count})


def _plan_there(path: Path, digest: str, teacher: Path, hours: float, inputs: Mapping[str, str]) -> Plan | None:
    """The plan of a file, if it is the one for this target and these hours. Raises as `plan_training` does."""
    there = Plan.read(path)
    if there and there.model == digest:
        for name, what in (("prompts", "other prompts"), ("chat_template", "another chat template")):
            if getattr(there, name) not in (None, inputs[name]):
                raise ValueError(
                    f"{path} is of {what}: remove or rename {path.parent}, {teacher} and {teacher}-held-out"
                )
    if there and (there.model, there.hours) == (digest, hours):
        if there.kind not in (None, inputs["kind"]):
            raise ValueError(
                f"{path} is of a drafter of kind {there.kind}, not {inputs['kind']}: choose another --output, or "
                f"remove or rename {path.parent}"
            )
        return there
    if there and (path.parent / "checkpoint.safetensors").exists():
        raise ValueError(
            f"{path.parent} holds a drafter of another plan, for --hours {there.hours:g}: remove or rename it, and the "
            f"same command trains one for --hours {hours:g}; teacher data are kept"
        )
    return None


def _measured_rates(
    model: Path, engine: Path, prompts: Sequence[Prompt], kind: str, layers: str | None, ranks: Ranks
) -> tuple[float, float, float]:
    """This rank's tokens of teacher data per second, the seconds that loading took, and its positions per second."""
    teacher_rate, loading_s = measure_teacher_rate(model, engine, ranks.threads)
    target = Target.from_folder(model).to("cuda" if torch.cuda.is_available() else "cpu")
    rows = usual_rows(target.config.vocab_size, target.embedding.weight.device.type)
    codec = TextCodec.load(model / "tokenizer.json")
    text = list(chain.from_iterable(codec.encode(prompt.turns[0]) for prompt in prompts[:MEASURED_PROMPTS]))
    if layers:
        give_layers(target, parse_layers(layers, target.config.num_layers))
    return teacher_rate, loading_s, measure_training_rate(target, DRAFTERS[kind], rows, text, ranks)


def usual_rows(vocab_size: int, device: str) -> int:
    """Head rows of a drafter that is trained on a device. A GPU carries the 32K most frequent of more than 40K tokens
    (Lyanna, section 6.1, for token info) and smaller vocabularies whole; a CPU pays for every row."""
    if device != "cuda":
        return min(12288, vocab_size)
    return 32768 if vocab_size > 40_000 else vocab_size


def measure_teacher_rate(model: Path, engine: Path, threads: int | None = None) -> tuple[float, float]:
    """Tokens of teacher data per second by an engine bundle that gives features, and the seconds that loading took."""
    begun = time.monotonic()
    ends = set(TargetConfig.load(model).eos_token_ids)
    generator = Generator(EngineForward(engine, threads), ends, [], 0)
    return generator.rate(), time.monotonic() - begun


def measure_training_rate(
    target: Target, kind: type[Drafter], rows: int, text: list[int], ranks: Ranks = ALONE, unroll: int = 5
) -> float:
    """A rank's positions per second of training a new drafter of a kind, with `rows` head rows, on a text's tokens."""
    recipe = kind.recipe
    batch = max(recipe.batch // ranks.count, 1)
    drafter = kind(kind.configure(target, rows, {}), target, torch.arange(rows)).to(target.embedding.weight.device)
    trainer = Trainer(target, drafter.train(), Labels.soft, unroll, recipe.hidden_weight)
    optimizer = make_optimizer(drafter, recipe.peak_rate)
    with tempfile.TemporaryDirectory() as folder:
        documents = read_text(target, text, 2 * batch * (recipe.window + unroll + 1))
        write_shard(Path(folder) / "shard-00000.safetensors", documents, {})
        data = TeacherData([Path(folder)], 0, kind.reads_context)
        batches = data.batches(batch, recipe.window, unroll, 0)
        rates = []
        for _ in range(TIMED_STEPS):
            begun = time.monotonic()
            windows = next(batches).to(trainer.device)
            optimizer.zero_grad()
            trainer.loss(windows).backward()
            for weight in drafter.parameters():
                if weight.grad is not None:
                    ranks.sum(weight.grad)
            optimizer.step()
            rates.append(int(windows.drafted.sum()) / (time.monotonic() - begun))
    return median(rates)  # a step of a new size compiles its kernels first


def read_text(target: Target, text: list[int], tokens: int) -> list[Document]:
    """Documents of at least so many tokens of a text, which is read again where it is shorter, with the target's
    features."""
    device = target.embedding.weight.device
    count = -(-tokens // DOCUMENT_TOKENS)
    whole = (text * (count * DOCUMENT_TOKENS // len(text) + 1))[: count * DOCUMENT_TOKENS]
    ids = torch.tensor(whole, device=device).view(count, DOCUMENT_TOKENS)
    with torch.no_grad():
        hidden = target(ids, causal_attend(target.config, DOCUMENT_TOKENS, device)).features.to(torch.bfloat16).cpu()
    return [
        Document(deque(), 0.0, tokens=row, hidden=list(states), answer_start=DOCUMENT_TOKENS // 8)
        for row, states in zip(ids.tolist(), hidden, strict=True)
    ]
