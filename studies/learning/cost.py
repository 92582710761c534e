"""What storing answers costs: tokens per second with `--learn` and without, in turns.

    python -m studies.learning.cost --bundle BUNDLE --concurrency 1 8 --output cost.json

Every answer is stored, in a folder that is removed. Prompts are those of the domains, answered greedily. Each repeat
answers the same prompts with and without, in the opposite order of the repeat before; the ratio is the median of the
repeats' ratios.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import BundleFolder, Concurrency, MaxTokens, Repeats, Report, Threads, run
from redraft.learning.policy import Policy
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.runtime import Runtime
from studies.learning.domains import DOMAINS
from studies.learning.served import TAUGHT, answer, prompts_of

ANSWERS_EACH = 4
"""Answers of each stream."""


def tokens_per_s(
    runtime: Runtime, prompts: list[list[int]], streams: int, max_tokens: int, folder: Path | None
) -> float:
    """Tokens per second, those answers stored whose folder is given."""
    if folder:
        runtime.store_answers(Policy(folder))
    else:
        runtime.with_methods(runtime.methods)
    begun = time.perf_counter()
    answers = answer(runtime, prompts, max_tokens, streams=streams)
    seconds = time.perf_counter() - begun
    runtime.end_storing()
    return sum(len(tokens) for tokens, _ in answers) / seconds


def main(
    bundle: BundleFolder,
    concurrency: Concurrency = [1, 8],
    repeats: Repeats = 7,
    max_tokens: MaxTokens = 64,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/learning_cost.json"),
) -> None:
    """Measure what storing answers costs."""
    runtime = Runtime.load(bundle, threads, prefix_reuse=False)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for streams in concurrency:
            count = -(-streams * ANSWERS_EACH // len(DOMAINS))
            prompts = [prompt for name in DOMAINS for prompt in prompts_of(runtime, name, count, TAUGHT)]
            answer(runtime, prompts, max_tokens, streams=streams)  # budgets learn what pays
            pairs = []
            for repeat in range(repeats):
                order = (Path(folder), None) if repeat % 2 else (None, Path(folder))
                rates = {each: tokens_per_s(runtime, prompts, streams, max_tokens, each) for each in order}
                pairs.append((rates[None], rates[Path(folder)]))
            rows.append(
                {
                    "streams": streams,
                    "tokens_per_s": round(median(without for without, _ in pairs), 1),
                    "tokens_per_s_storing": round(median(storing for _, storing in pairs), 1),
                    "ratio": round(median(storing / without for without, storing in pairs), 4),
                    "ratios": [round(storing / without, 4) for without, storing in pairs],
                }
            )
    runtime.engine.close()
    report = {"repeats": repeats, "max_tokens": max_tokens, "figures": rows}
    finish(output, report, table(report))


def table(report: dict[str, Any]) -> Table:
    """Tokens per second with and without storing, by streams."""
    rows = []
    for row in report["figures"]:
        cells = (f"{row[key]:.1f}" for key in ("tokens_per_s", "tokens_per_s_storing"))
        rows.append([str(row["streams"]), *cells, f"{row['ratio']:.3f}"])
    return Table("tokens/s", ["streams", "without", "storing", "ratio"], rows)


if __name__ == "__main__":
    run(main)
