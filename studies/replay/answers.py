"""The target's own greedy answers to prompts, with its hidden states: what drafters are replayed on.

    python -m studies.replay.answers --bundle BUNDLE --prompts mt_bench.jsonl --output artifacts/answers

Safetensors shards, as redraft distill writes them. The bundle needs a drafter, or --features when it is built;
how it decodes does not change the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors import safe_open
from torch import Tensor

from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, NumPrompts, PromptsFile, console, run
from benchmarks.speed.inprocess import load_llm, teacher_force
from redraft.console.progress import tracked
from redraft.llm import LLM
from redraft.loadtest.workload import ChatTokenizer
from redraft.model_defs.files import save_tensors
from redraft.prompts import load_prompts, spread
from redraft.request import GenerateRequest

SHARD = 16
"""Answers of a shard, of which `benchmarks.verify.held_out` judges drafters by 24 at most."""


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's answer."""

    tokens: Tensor
    """int64 [n]"""
    hidden: Tensor
    """float32 [n, H], the target's hidden states after its final norm: row t predicts token t + 1"""
    start: int
    """Where the answer begins; 1 or more."""

    @property
    def text(self) -> list[int]:
        """The answer's tokens."""
        return self.tokens[self.start :].tolist()


def record(llm: LLM, requests: list[GenerateRequest], concurrency: int) -> list[Answer]:
    """Answer requests, and run each whole text once more for its hidden states. Raises ValueError where the bundle
    gives no features."""
    answers = []
    generated = llm.run(requests, min(concurrency, llm.runtime.limits.slots))
    for asked, answer in tracked(list(zip(requests, generated, strict=True)), "hidden states", "answers", console):
        prompt = llm.runtime.sequence(0, asked).prompt.tolist()
        tokens = [*prompt, *answer.token_ids]
        states = [hidden for _, hidden in teacher_force(llm, tokens, 0) if hidden is not None]
        if not states:
            raise ValueError("the bundle gives no features: build it with a drafter, or with --features")
        answers.append(Answer(torch.tensor(tokens), torch.from_numpy(np.concatenate(states)), len(prompt)))
    return answers


def write(folder: Path, answers: list[Answer]) -> None:
    """Write answers as shards of teacher data, instead of those that the folder holds."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in shards_of(folder):
        file.unlink()
    for index, start in enumerate(range(0, len(answers), SHARD)):
        part = answers[start : start + SHARD]
        offsets = torch.tensor([0, *accumulate(len(answer.tokens) for answer in part)])
        tensors = {
            "tokens": torch.cat([answer.tokens for answer in part]).to(torch.int32),
            "hidden": torch.cat([answer.hidden for answer in part]).to(torch.bfloat16),
            "offsets": offsets,
            "answer_starts": offsets[:-1] + torch.tensor([answer.start for answer in part]),
        }
        save_tensors(tensors, folder / f"shard-{index:05}.safetensors")


def shards_of(folder: Path) -> list[Path]:
    """The shards of a folder, in their order."""
    return sorted(folder.glob("shard-*.safetensors"))


def read(folder: Path, count: int | None = None, max_tokens: int | None = None) -> list[Answer]:
    """`count` answers spread evenly over a folder's shards, each cut to `max_tokens`.

    Answers of less than 2 tokens, which no draft can help, are left out. Raises ValueError where there is no shard.
    """
    if not (files := shards_of(folder)):
        raise ValueError(f"{folder}: no shard; write some with python -m studies.replay.answers")
    answers = []
    for file in files:
        with safe_open(file, framework="pt") as shard:
            tokens, hidden, offsets, starts = (
                shard.get_tensor(name) for name in ("tokens", "hidden", "offsets", "answer_starts")
            )
        for begin, start, end in zip(offsets[:-1].tolist(), starts.tolist(), offsets[1:].tolist(), strict=True):
            end = min(end, start + max_tokens) if max_tokens else end
            if end - start > 1:
                answers.append(Answer(tokens[begin:end].long(), hidden[begin:end].float(), start - begin))
    return spread(answers, count)


def main(
    bundle: BundleFolder,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = 128,
    concurrency: Annotated[int, typer.Option(help="Answers at a time.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("artifacts/answers"),
) -> None:
    llm, tokenizer = load_llm(bundle), ChatTokenizer(bundle)
    chosen = spread(load_prompts(prompts), num_prompts)
    requests = [tokenizer.request(prompt.turns[0], max_tokens, temperature=0.0) for prompt in chosen]
    try:
        answers = record(llm, requests, concurrency)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    finally:
        llm.close()
    write(output, answers)
    console.print(f"{len(answers)} answers, {sum(len(answer.text) for answer in answers):,} tokens: {output}")


if __name__ == "__main__":
    run(main)
