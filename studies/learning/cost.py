"""What storing answers costs: tokens per second with `--learn` and without, in turns, and CPU time per token.

    python -m studies.learning.cost --bundle BUNDLE --concurrency 1 8 --output cost.json

Every answer is stored, in a folder that is removed. Prompts are those of the domains, answered greedily. Each repeat
answers the same prompts with and without, in the opposite order of the repeat before. Ratios are medians of the
repeats' ratios. CPU time is that of all threads; it varies less than tokens per second where others use the cores.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import BundleFolder, Concurrency, MaxTokens, Repeats, Report, Threads, run
from redraft.learning.policy import Policy
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.runtime import Runtime
from studies.learning.domains import DOMAINS
from studies.learning.served import TAUGHT, answer, prompts_of

ANSWERS_EACH = 4
"""Answers of each stream."""


def rates(
    runtime: Runtime, prompts: list[list[int]], streams: int, max_tokens: int, folder: Path | None
) -> tuple[float, float]:
    """Tokens per second, and CPU milliseconds of each; the answers are stored where a folder is given."""
    if folder:
        runtime.store_answers(Policy(folder))
    else:
        runtime.with_methods(runtime.methods)
    begun, cpu_begun = time.perf_counter(), time.process_time()
    answers = answer(runtime, prompts, max_tokens, streams=streams)
    seconds = time.perf_counter() - begun
    runtime.end_storing()
    cpu_s = time.process_time() - cpu_begun  # with what the writer's thread does
    count = sum(len(tokens) for tokens, _ in answers)
    return count / seconds, 1e3 * cpu_s / count


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
                measured = {each: rates(runtime, prompts, streams, max_tokens, each) for each in order}
                pairs.append((*measured[None], *measured[Path(folder)]))
            without, cpu_without, storing, cpu_storing = np.array(pairs).T
            rows.append(
                {
                    "streams": streams,
                    "tokens_per_s": round(float(np.median(without)), 1),
                    "tokens_per_s_storing": round(float(np.median(storing)), 1),
                    "ratio": round(float(np.median(storing / without)), 4),
                    "cpu_ms_per_token": round(float(np.median(cpu_without)), 3),
                    "cpu_ms_per_token_storing": round(float(np.median(cpu_storing)), 3),
                    "cpu_ratio": round(float(np.median(cpu_storing / cpu_without)), 4),
                    "ratios": (storing / without).round(4).tolist(),
                    "cpu_ratios": (cpu_storing / cpu_without).round(4).tolist(),
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
        rows.append([str(row["streams"]), *cells, f"{row['ratio']:.3f}", f"{row['cpu_ratio']:.3f}"])
    return Table("tokens/s", ["streams", "without", "storing", "ratio", "of CPU time"], rows)


if __name__ == "__main__":
    run(main)
