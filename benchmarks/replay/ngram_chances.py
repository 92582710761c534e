"""How often an n-gram guess is right, by match length and repeats: the figures that rank n-gram draft tokens.

python -m benchmarks.replay.ngram_chances --data TEACHER_DATA [--shards 6]
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from safetensors import safe_open

from benchmarks.figures.tables import Table
from redraft.console.progress import tracked
from redraft.decoding.ngram import CHANCES, LONGEST, MOST_TIMES, NgramIndex

console = Console()


def count(shard: Path, tried: Counter, right: Counter) -> None:
    """Add a shard's answers: every token is guessed from those before it, the prompt's included."""
    with safe_open(shard, framework="np") as data:
        tokens, offsets, starts = (data.get_tensor(name).tolist() for name in ("tokens", "offsets", "answer_starts"))
    for begin, end, answer in zip(offsets[:-1], offsets[1:], starts, strict=True):
        index = NgramIndex(tokens[begin:answer])
        for place in range(answer, end):
            if found := index.match(tuple(tokens[max(begin, place - LONGEST) : place])):
                guess, *kind = found
                tried[tuple(kind)] += 1
                right[tuple(kind)] += guess == tokens[place]
            index.extend([tokens[place]])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="teacher data written by build/distill.py")
    parser.add_argument("--shards", type=int, default=6, help="shards to read")
    arguments = parser.parse_args()
    shards = sorted(arguments.data.glob("shard-*.safetensors"))[: arguments.shards]
    if not shards:
        parser.error(f"{arguments.data} holds no shard-*.safetensors")
    tried: Counter = Counter()
    right: Counter = Counter()
    for shard in tracked(shards, "counting", "shards", console):
        count(shard, tried, right)
    repeats = [f"{times} in a row" for times in range(1, MOST_TIMES)] + [f"{MOST_TIMES} or more"]
    table = Table(f"N-gram guesses that were right, {sum(tried.values()):,} in all", ["tokens matched", *repeats])
    for length in CHANCES:
        kinds = [(length, times) for times in range(1, MOST_TIMES + 1)]
        cells = [f"{right[kind] / tried[kind]:.2f} ({tried[kind]:,})" if tried[kind] else "-" for kind in kinds]
        table.rows.append([str(length), *cells])
    table.show(console)


if __name__ == "__main__":
    main()
