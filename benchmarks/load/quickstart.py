"""Serve two bundles, load-test them in turn at the same rates, compare them and write a report.

    python -m benchmarks.load.quickstart

Builds the default model's bundles with and without a drafter first, unless they are named. Every server is stopped,
whatever happens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.command import PROMPTS_FILE, PromptsFile
from benchmarks.command import run as run_script
from benchmarks.load.served import run, served
from redraft.cli.options import ColumnOption
from redraft.cli.prepare import fetched
from redraft.cli.steps import Steps
from redraft.console.interrupt import interruptible
from redraft.home import HOME
from redraft.serving.settings import DEFAULT

FOLDER = HOME / "quickstart"
BASELINE_OFFSET = 10
"""Between the ports of the two servers."""
console = Console()


@interruptible("quickstart", "the servers are stopped")
def main(
    bundle: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Engine bundle with a drafter; default: the default model's.")
    ] = None,
    auto_regressive: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Engine bundle without a drafter; default: the default model's."),
    ] = None,
    request_rate: Annotated[list[float], typer.Option(help="Requests per second.")] = [0.5, 1, 2],
    prompts: PromptsFile = PROMPTS_FILE,
    column: ColumnOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per rate.")] = 16,
    port: Annotated[
        int,
        typer.Option(
            help="The first of four ports of the server with drafter: HTTP, gRPC, metrics and /v1. The other server's "
            f"are higher by {BASELINE_OFFSET}."
        ),
    ] = 8000,
) -> None:
    if bundle is None or auto_regressive is None:
        steps = Steps("quickstart")
        options = {"--model": str(fetched(DEFAULT, steps))}
        bundle = bundle or Path(steps.built_bundle(options)["--output"])
        auto_regressive = auto_regressive or Path(steps.built_bundle(options | {"--no-drafter": ""})["--output"])
    ports = [port + number for number in range(4)]
    baseline_ports = [number + BASELINE_OFFSET for number in ports]
    baseline, speculative = FOLDER / "auto-regressive", FOLDER / "speculative"
    console.rule(f"serve {auto_regressive.name} and {bundle.name}")
    with (
        served(["--bundle", auto_regressive], FOLDER / "run-auto-regressive", baseline_ports[0]),
        served(["--bundle", bundle], FOLDER / "run-speculative", port),
    ):
        console.rule(f"load test at {', '.join(map(str, request_rate))} requests/s, the servers in turn")
        run(
            "redraft", "loadtest", "--bundle", bundle, "--label", "speculative",
            "--url", f"127.0.0.1:{ports[1]}", "--metrics-url", f"http://127.0.0.1:{ports[2]}/metrics",
            "--baseline-url", f"127.0.0.1:{baseline_ports[1]}", "--baseline", baseline,
            "--output", speculative, "--num-prompts", num_prompts, "--max-tokens", 64,
            "--seconds", 0, "--ramp", 2, "--runs", 1, "--request-rate", *request_rate, "--prompts", prompts,
            *(("--column", column) if column else ()),
        )  # fmt: skip
    console.rule("report")
    run("benchmarks.load.report", "--load", baseline, speculative, "--output", FOLDER / "report.html")


if __name__ == "__main__":
    run_script(main)
