"""Serve two bundles in turn, load-test both at the same rates, compare them and write a report.

    python -m benchmarks.quickstart --baseline AR_BUNDLE --bundle SPEC_BUNDLE

What `make quickstart` runs once the bundles are built. Every server is stopped, whatever happens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

RUN_DIR = Path("artifacts/quickstart")
console = Console()


def run(*arguments: str | Path) -> None:
    """Run one of our modules; exit with its status where it fails."""
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)])
    if done.returncode:
        raise SystemExit(done.returncode)


def load_test(bundle: Path, label: str, results: Path, rates: list[str], prompts: int, extra: list[str | Path]) -> None:
    """One served load test; the server is stopped at its end."""
    console.rule(f"{label}: serve {bundle}")
    try:
        run("redraft.cli", "serve", "--bundle", bundle, "--run-dir", RUN_DIR / "run")
        console.rule(f"{label}: load test at {', '.join(rates)} requests/s")
        run(
            "benchmarks.loadtest", "--tokenizer", bundle, "--label", label, "--result-dir", results,
            "--num-prompts", str(prompts), "--max-tokens", "64", "--request-rate", *rates, *extra,
        )  # fmt: skip
    finally:
        run("redraft.cli", "stop", "--run-dir", RUN_DIR / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True, help="bundle without drafter")
    parser.add_argument("--bundle", type=Path, required=True, help="bundle with drafter")
    parser.add_argument("--request-rate", nargs="+", default=["0.5", "1", "2"], help="requests per second")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests per rate")
    arguments = parser.parse_args()
    baseline, speculative = RUN_DIR / "auto-regressive", RUN_DIR / "speculative"
    settings = (arguments.request_rate, arguments.num_prompts)
    load_test(arguments.baseline, "auto-regressive", baseline, *settings, [])
    load_test(arguments.bundle, "speculative", speculative, *settings, ["--baseline", baseline])
    console.rule("report")
    run("benchmarks.report", "--load", baseline, speculative, "--output", RUN_DIR / "report.html")


if __name__ == "__main__":
    main()
