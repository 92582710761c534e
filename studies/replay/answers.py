"""The target's own greedy answers to prompts, with its hidden states: what drafters are replayed on.

    python -m studies.replay.answers --bundle BUNDLE --dataset mt_bench.jsonl --output artifacts/answers

One safetensors shard, as redraft distill writes them. The bundle needs a drafter, or --features when it is built;
how it decodes does not change the answers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import load_llm, teacher_force
from redraft.console.progress import tracked
from redraft.llm import LLM
from redraft.model_defs.files import save_tensors
from redraft.prompts import load_prompts, spread
from redraft.request import request

FILE_NAME = "shard-00000.safetensors"
console = Console()


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


def record(llm: LLM, prompts: list[str], max_tokens: int, concurrency: int) -> list[Answer]:
    """Answers of an LLM's target, one forward of each whole text for its hidden states.

    Raises ValueError where the bundle gives no features.
    """
    requests = [request(text, max_tokens, temperature=0.0) for text in prompts]
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


def write(folder: Path, answers: list[Answer]) -> Path:
    """Write answers as a shard of teacher data."""
    offsets = torch.tensor([0, *accumulate(len(answer.tokens) for answer in answers)])
    tensors = {
        "tokens": torch.cat([answer.tokens for answer in answers]).to(torch.int32),
        "hidden": torch.cat([answer.hidden for answer in answers]).to(torch.bfloat16),
        "offsets": offsets,
        "answer_starts": offsets[:-1] + torch.tensor([answer.start for answer in answers]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / FILE_NAME)
    return folder / FILE_NAME


def read(folder: Path, count: int | None = None, max_tokens: int | None = None) -> list[Answer]:
    """`count` answers spread evenly over a folder's first shard, each cut to `max_tokens`.

    Answers of less than 2 tokens, which no draft can help, are left out. Raises ValueError where there is no shard.
    """
    file = folder / FILE_NAME
    if not file.exists():
        raise ValueError(f"{folder}: no {FILE_NAME}; write it with python -m studies.replay.answers")
    with safe_open(file, framework="pt") as shard:
        tokens, hidden, offsets, starts = (
            shard.get_tensor(name) for name in ("tokens", "hidden", "offsets", "answer_starts")
        )
    answers = []
    for begin, start, end in zip(offsets[:-1].tolist(), starts.tolist(), offsets[1:].tolist(), strict=True):
        end = min(end, start + max_tokens) if max_tokens else end
        if end - start > 1:
            answers.append(Answer(tokens[begin:end].long(), hidden[begin:end].float(), start - begin))
    return spread(answers, count)


def main(argv: list[str] | None = None) -> None:
    """Answer the prompts and write the shard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="bundle that gives features")
    add("--dataset", type=Path, default=Path("benchmarks/prompts.jsonl"))
    add("--num-prompts", type=int, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=128)
    add("--concurrency", type=int, default=8)
    add("--output", type=Path, default=Path("artifacts/answers"))
    args = parser.parse_args(argv)
    llm, tokenizer = load_llm(parser, args.bundle), ChatTokenizer(args.bundle)
    prompts = [tokenizer.chat(prompt.turns[0]) for prompt in spread(load_prompts(args.dataset), args.num_prompts)]
    try:
        answers = record(llm, prompts, args.max_tokens, args.concurrency)
    except ValueError as error:
        parser.error(str(error))
    finally:
        llm.close()
    path = write(args.output, answers)
    tokens = sum(len(answer.text) for answer in answers)
    console.print(f"{len(answers)} answers, {tokens:,} tokens: {path}")


if __name__ == "__main__":
    main()
