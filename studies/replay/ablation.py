"""Conditional acceptance of the first draft steps, for drafters that differ in one thing (Lyanna, table 1).

    python -m studies.replay.ablation --model MODEL --drafters FULL NO_TOKEN_INFO NO_FIRST_TOKEN \\
      --answers artifacts/answers

Trees 3 deep, 4 wide and of the 16 most likely nodes are followed along the target's greedy answers (python -m
studies.replay.answers). Step d's rate: trees whose accepted path goes on at depth d, over those where it got to d -
1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from redraft.console.progress import tracked
from redraft.decoding.construction import best_first
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer, read
from studies.replay.replay import Outcome, Replayer, interval, roots_of
from studies.training.learning_curve import labels_of

console = Console()


def acceptance(replayer: Replayer, answers: Sequence[Answer], length: int, width: int, nodes: int) -> dict[str, Any]:
    """Acceptance of best-first trees of `nodes`: up to `width` expanded on each of `length` levels, as many
    children each."""
    outcome = Outcome()
    for answer in answers:
        tree = best_first(replayer.draft(answer, width, length), roots_of(answer), nodes)
        outcome.follow(tree, answer.text, length)
    return {
        "conditional": outcome.conditional,
        "accepted": outcome.accepted_by_depth,
        "offered": outcome.offered_by_depth,
        "acceptance_length": outcome.acceptance_length,
        "interval": interval(outcome.accepted),
        "steps": len(outcome.accepted),
    }


def table(results: dict[str, dict[str, Any]], title: str) -> Table:
    """A row per drafter: rates with their counts, and tokens per step."""
    steps = len(next(iter(results.values()))["conditional"])
    shown = Table(title, ["drafter", *(f"step {step}" for step in range(1, steps + 1)), "tokens per step"])
    for label, row in results.items():
        rates = zip(row["conditional"], row["accepted"], row["offered"], strict=True)
        cells = [f"{rate:.1%} ({accepted}/{offered})" for rate, accepted, offered in rates]
        shown.rows.append([label, *cells, f"{row['acceptance_length']:.2f} ±{row['interval']:.2f}"])
    return shown


def main(argv: list[str] | None = None) -> None:
    """Replay every drafter, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target, written by redraft fetch")
    add("--drafters", type=Path, nargs="+", required=True, help="folders of drafters")
    add("--answers", type=Path, default=Path("artifacts/answers"), help="folder written by studies.replay.answers")
    add("--num-prompts", type=int, help="answers, spread evenly over the folder; default: all")
    add("--max-tokens", type=int, help="of each answer; default: all")
    add("--length", type=int, default=3, help="levels of a tree")
    add("--width", type=int, default=4, help="expanded nodes of a level, and children of each")
    add("--nodes", type=int, default=16, help="nodes of a tree, root excluded")
    add("--output", type=Path, default=Path("docs/results/ablation.json"))
    args = parser.parse_args(argv)
    target, results = Target.from_folder(args.model), {}
    try:
        answers = read(args.answers, args.num_prompts, args.max_tokens)
        labels = zip(labels_of(args.drafters), args.drafters, strict=True)
        for label, folder in tracked(list(labels), "replaying", "drafters", console):
            replayer = Replayer.load(folder, target, args.length)
            results[label] = acceptance(replayer, answers, args.length, args.width, args.nodes)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        parser.error(str(error))
    title = f"Conditional acceptance, trees {args.length} deep, {args.width} wide, {args.nodes} nodes (Lyanna, table 1)"
    table(results, title).show(console)
    shape = {"length": args.length, "width": args.width, "nodes": args.nodes}
    save_report(args.output, {"answers": len(answers), **shape, "drafters": results})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
