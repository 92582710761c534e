"""Count which tokens the target uses, and which follow which, in the answers of teacher data.

Writes `token_counts.npy`, int64 [2, V], the counts of every other answer (studies/training.py plots
what a hot vocabulary covers), and `bigrams.npy`, each token's most frequent successor, for redraft build --bigrams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from redraft.decoding.ngram import count_bigrams
from redraft.model_defs.target.config import TargetConfig
from redraft.training.teacher_data import TeacherData


def main(
    model: Annotated[Path, typer.Option(help="Target folder written by redraft fetch.")],
    data: Annotated[list[Path], typer.Option(help="Teacher data of redraft distill; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the two files.")],
) -> None:
    """Count tokens and their successors in the target's own answers."""
    try:
        vocab_size = TargetConfig.load(model).vocab_size
        answers = [tokens.numpy() for tokens in TeacherData(data, 0, prompts=False).answers()]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    halves = [np.bincount(np.concatenate(answers[half::2]), minlength=vocab_size) for half in range(2)]
    bigrams = count_bigrams(answers, vocab_size)
    output.mkdir(parents=True, exist_ok=True)
    np.save(output / "token_counts.npy", np.stack(halves))
    np.save(output / "bigrams.npy", bigrams)
    print(
        f"{len(answers):,} answers, {sum(map(len, answers)):,} tokens; {(bigrams >= 0).sum():,} tokens have a successor"
    )
    print(f"written: {output}/token_counts.npy, {output}/bigrams.npy ({(bigrams >= 0).sum():,} successors)")
