"""Serve two bundles, load-test them in turn at the same rates, compare them and write a report.

    python -m benchmarks.load.quickstart --baseline AR_BUNDLE --bundle SPEC_BUNDLE

What `make quickstart` runs once the bundles are built. Every server is stopped, whatever happens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from redraft.console.interrupt import interruptible

PROMPTS = Path("benchmarks/prompts.jsonl")
RUN_DIR = Path("artifacts/quickstart")
PORTS = (8000, 8001, 8002, 8003)
BASELINE_OFFSET = 10
"""Between the ports of the two servers."""
console = Console()


def run(*arguments: str | Path) -> None:
    """Run one of our modules; exit with its status where it fails."""
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)])
    if done.returncode:
        raise SystemExit(done.returncode)


@contextmanager
def served(bundle: Path, ports: Sequence[int]) -> Iterator[None]:
    """A Triton server of the bundle on four ports (HTTP, gRPC, metrics, /v1); stopped at the end."""
    console.rule(f"serve {bundle}")
    run_dir = RUN_DIR / f"run-{ports[0]}"
    options = zip(("--http-port", "--grpc-port", "--metrics-port", "--openai-port"), ports, strict=True)
    try:
        run(
            "redraft.cli",
            "serve",
            "--bundle",
            bundle,
            "--run-dir",
            run_dir,
            *(str(word) for pair in options for word in pair),
        )
        yield
    finally:
        run("redraft.cli", "stop", "--run-dir", run_dir)


@interruptible("quickstart", "the servers are stopped")
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True, help="bundle without drafter")
    parser.add_argument("--bundle", type=Path, required=True, help="bundle with drafter")
    parser.add_argument("--request-rate", nargs="+", default=["0.5", "1", "2"], help="requests per second")
    parser.add_argument("--dataset", type=Path, default=PROMPTS, help="prompts, in any format of the load test")
    parser.add_argument("--column", help="field or column of --dataset that holds the prompts")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests per rate")
    parser.add_argument(
        "--ports", nargs=4, type=int, default=PORTS, metavar=("HTTP", "GRPC", "METRICS", "OPENAI"),
        help=f"of the server with drafter; the other's are higher by {BASELINE_OFFSET}",
    )  # fmt: skip
    arguments = parser.parse_args()
    _, grpc_port, metrics_port, _ = ports = arguments.ports
    baseline_ports = [port + BASELINE_OFFSET for port in ports]
    baseline, speculative = RUN_DIR / "auto-regressive", RUN_DIR / "speculative"
    with served(arguments.baseline, baseline_ports), served(arguments.bundle, ports):
        console.rule(f"load test at {', '.join(arguments.request_rate)} requests/s, the servers in turn")
        run(
            "benchmarks.load.loadtest", "--tokenizer", arguments.bundle, "--label", "speculative",
            "--url", f"127.0.0.1:{grpc_port}", "--metrics-url", f"http://127.0.0.1:{metrics_port}/metrics",
            "--baseline-url", f"127.0.0.1:{baseline_ports[1]}", "--baseline", baseline, "--result-dir", speculative,
            "--num-prompts", str(arguments.num_prompts), "--max-tokens", "64",
            "--seconds", "0", "--ramp", "2", "--runs", "1",
            "--request-rate", *arguments.request_rate, "--dataset", arguments.dataset,
            *(("--column", arguments.column) if arguments.column else ()),
        )  # fmt: skip
    console.rule("report")
    run("benchmarks.load.report", "--load", baseline, speculative, "--output", RUN_DIR / "report.html")


if __name__ == "__main__":
    main()
