"""Serve two bundles, load-test them in turn at the same rates, compare them and write a report.

    python -m benchmarks.load.quickstart

Builds the default model's bundles with and without a drafter first, unless they are named. Every server is stopped,
whatever happens.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.command import PROMPTS_FILE, PromptsFile
from benchmarks.command import run as run_script
from redraft.cli.prepare import fetched
from redraft.cli.steps import Steps
from redraft.console.interrupt import interruptible
from redraft.home import HOME
from redraft.serving.settings import DEFAULT

FOLDER = HOME / "quickstart"
PORTS = (8000, 8001, 8002, 8003)
BASELINE_OFFSET = 10
"""Between the ports of the two servers."""
console = Console()


def run(*arguments: object) -> None:
    """Run one of our modules; exit with its status where it fails."""
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)])
    if done.returncode:
        raise SystemExit(done.returncode)


@contextmanager
def served(bundle: Path, ports: Sequence[int]) -> Iterator[None]:
    """A Triton server of the bundle on four ports (HTTP, gRPC, metrics, /v1); stopped at the end."""
    console.rule(f"serve {bundle}")
    run_dir = FOLDER / f"run-{ports[0]}"
    options = zip(("--http-port", "--grpc-port", "--metrics-port", "--openai-port"), ports, strict=True)
    try:
        run(
            "redraft.cli",
            "serve",
            "--bundle",
            bundle,
            "--run-dir",
            run_dir,
            *(word for pair in options for word in pair),
        )
        yield
    finally:
        run("redraft.cli", "stop", "--run-dir", run_dir)


@interruptible("quickstart", "the servers are stopped")
def main(
    bundle: Annotated[Path | None, typer.Option(help="Bundle with a drafter; default: the default model's.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Bundle without; default: the default model's.")] = None,
    request_rate: Annotated[list[str], typer.Option(help="Requests per second.")] = ["0.5", "1", "2"],
    prompts: PromptsFile = PROMPTS_FILE,
    column: Annotated[str | None, typer.Option(help="Field or column of --prompts that holds them.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests per rate.")] = 16,
    ports: Annotated[
        tuple[int, int, int, int],
        typer.Option(
            help=f"HTTP, gRPC, metrics and /v1 of the server with drafter; the other's are higher by {BASELINE_OFFSET}."
        ),
    ] = PORTS,
) -> None:
    if bundle is None or baseline is None:
        steps = Steps("quickstart")
        options = {"--model": str(fetched(DEFAULT, steps))}
        bundle = bundle or Path(steps.tuned_bundle(options, 4)["--output"])
        baseline = baseline or Path(steps.tuned_bundle(options | {"--no-drafter": ""}, 0)["--output"])
    baseline_ports = [port + BASELINE_OFFSET for port in ports]
    auto_regressive, speculative = FOLDER / "auto-regressive", FOLDER / "speculative"
    with served(baseline, baseline_ports), served(bundle, ports):
        console.rule(f"load test at {', '.join(request_rate)} requests/s, the servers in turn")
        run(
            "redraft.cli", "loadtest", "--tokenizer", bundle, "--label", "speculative",
            "--url", f"127.0.0.1:{ports[1]}", "--metrics-url", f"http://127.0.0.1:{ports[2]}/metrics",
            "--baseline-url", f"127.0.0.1:{baseline_ports[1]}", "--baseline", auto_regressive,
            "--result-dir", speculative, "--num-prompts", num_prompts, "--max-tokens", 64,
            "--seconds", 0, "--ramp", 2, "--runs", 1, "--request-rate", *request_rate, "--prompts", prompts,
            *(("--column", column) if column else ()),
        )  # fmt: skip
    console.rule("report")
    run("benchmarks.load.report", "--load", auto_regressive, speculative, "--output", FOLDER / "report.html")


if __name__ == "__main__":
    run_script(main)
