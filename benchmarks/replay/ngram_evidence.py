"""How often a token comes that n-grams guess, by their chance and by the drafter's score of it.

    python -m benchmarks.replay.ngram_evidence --bundle SPEC_BUNDLE

The target answers every prompt, the drafter drafts at every place of the answers, and its candidates are followed along
them. Beside each measured share stands what `redraft.decoding.growth.joint_odds` makes of the two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.grid import Replay, record
from benchmarks.speed.inprocess import load_llm
from compiler.tuning.scores import Drafted, guesses, joint_chance
from redraft.decoding.ngram import CHANCES
from redraft.prompts import load_prompts, spread

NEURAL = (0.0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Ends of the classes of the drafter's probability; what it does not draft has 0."""
console = Console()


def joined(replay: Replay) -> Iterator[tuple[float, float, bool, float]]:
    """The chance of the n-grams' guess, the drafter's score of it, whether it came, and what is made of the two,
    wherever both know something."""
    arrays = (replay.drafts.candidates, replay.drafts.log_probs, replay.drafts.parents)
    drafts = {place + 1: Drafted(*(array[place] for array in arrays)) for place in range(len(replay.tokens) - 1)}
    for guess in guesses(replay.prompt, replay.tokens, drafts):
        if guess.neural is not None:
            chance = joint_chance(guess, replay.scores.ngram_odds, replay.reads_context)
            yield guess.prior, guess.neural, guess.came, chance


def table(replays: list[Replay], least: int = 20) -> Table:
    """Shares of at least so many guesses each."""
    found = np.array([guess for replay in replays for guess in joined(replay)])
    classes = np.searchsorted(NEURAL, found[:, 1])
    shown = Table(
        f"Share of {len(found):,} n-gram guesses that came (guesses) ~ joint odds, by the drafter's probability",
        ["n-gram chance", "not drafted", *(f"to {end}" for end in NEURAL[1:])],
    )
    for chance in sorted({chance for chances in CHANCES.values() for chance in chances}):
        cells = []
        for place in range(len(NEURAL)):
            some = found[(found[:, 0] == chance) & (classes == place)]
            joint = f"{some[:, 3].mean():.2f}" if len(some) else ""
            cells.append(f"{some[:, 2].mean():.2f} ({len(some)}) ~ {joint}" if len(some) >= least else "")
        if any(cells):
            shown.rows.append([f"{chance:.2f}", *cells])
    return shown


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="a bundle with a drafter")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    llm, tokenizer = load_llm(parser, args.bundle), ChatTokenizer(args.bundle)
    if not llm.runtime.engine.drafters:
        parser.error(f"--bundle: {args.bundle} has no drafter")
    users = [prompt.turns[0] for prompt in spread(load_prompts(args.dataset), args.num_prompts)]
    prompts = [tokenizer.chat(user) for user in users]
    table(record(llm, prompts, args.max_tokens, {"temperature": args.temperature}, 8)).show(console)
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
