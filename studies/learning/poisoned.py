"""A drafter of random weights is swapped into a running service, under load.

    redraft serve --run-dir RUN_DIR
    python -m studies.learning.poisoned --run-dir RUN_DIR --drafter drafters/NAME --output poisoned.json

Clients send the same prompts over and over, greedily. The drafter's weights are replaced by normal noise of the same
scale, and it is swapped in with `redraft swap --drafter`; at the end `--back` brings the old one. What is counted:
requests that fail, answers that differ from the first ones, and, with the random drafter, tokens per second beside
auto-regressive decoding by the same service, in turns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from benchmarks.command import MaxTokens, Repeats, Report, run
from redraft.chat import Writing, render_chat
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.request import AUTO_REGRESSIVE, request
from redraft.serving.rundir import RunDir
from redraft.worker.client import WorkerClient
from studies.learning.domains import DOMAINS
from studies.learning.served import TAUGHT

CONNECT_S = 10.0


def randomized(drafter: Path, folder: Path) -> Path:
    """A copy of a drafter whose weights are normal noise of their own scale."""
    torch.manual_seed(0)
    tensors = load_file(drafter / "drafter.safetensors")
    noise = {
        name: (torch.randn(tensor.shape) * tensor.float().std()).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }
    save_file(noise, folder / "drafter.safetensors")
    (folder / "config.json").write_bytes((drafter / "config.json").read_bytes())
    return folder


class Load:
    """Clients of a service that send the same prompts."""

    def __init__(self, run_dir: Path, prompts: Sequence[str], max_tokens: int):
        self._client, self._prompts, self._max_tokens = WorkerClient(RunDir(run_dir).socket), prompts, max_tokens
        if not self._client.wait_connected(CONNECT_S):
            raise typer.BadParameter(f"--run-dir {run_dir}: no service answers: `redraft serve` starts one")
        self._pool = ThreadPoolExecutor(len(prompts))
        self.answers: list[str] = []
        self.failures, self.differences, self.requests = list[str](), 0, 0

    def round(self, method: str | None = None) -> float:
        """Ask all prompts at once. Returns tokens per second."""
        begun = time.perf_counter()
        parts = list(self._pool.map(lambda prompt: self._ask(prompt, method), self._prompts))
        seconds = time.perf_counter() - begun
        texts = [text for text, _ in parts]
        self.answers = self.answers or texts
        self.differences += sum(text != first for text, first in zip(texts, self.answers, strict=True))
        return sum(tokens for _, tokens in parts) / seconds

    def _ask(self, prompt: str, method: str | None) -> tuple[str, int]:
        self.requests += 1
        wanted = request(
            prompt, self._max_tokens, add_special_tokens=False, method=method, store=False, cache_prompt=False
        )
        try:
            answer = self._client.complete(wanted.model_copy(update={"id": self._client.new_id()}))
        except Exception as error:
            self.failures.append(str(error))
            return "", 0
        return answer.text, len(answer.token_ids)


def swap(*arguments: object) -> None:
    """Run `redraft swap`. Raises CalledProcessError where it fails."""
    subprocess.run(
        [sys.executable, "-m", "redraft", "swap", *map(str, arguments)], check=True, stderr=subprocess.DEVNULL
    )


def main(
    run_dir: Annotated[Path, typer.Option(help="Where the service runs.")],
    drafter: Annotated[Path, typer.Option(metavar="FOLDER", help="The drafter whose weights are replaced.")],
    streams: Annotated[int, typer.Option("--concurrency", min=1, help="Requests at a time.")] = 4,
    repeats: Repeats = 5,
    max_tokens: MaxTokens = 64,
    output: Report = Path("artifacts/reports/learning_poisoned.json"),
) -> None:
    """Swap random weights in under load."""
    bundle = RunDir(run_dir).bundle
    prompts = [
        render_chat(bundle, prompt, Writing({}))
        for domain in DOMAINS.values()
        for prompt in domain.prompts(-(-streams // len(DOMAINS)), TAUGHT)
    ][:streams]
    load = Load(run_dir, prompts, max_tokens)
    load.round()
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(swap, "--drafter", randomized(drafter, Path(folder)), "--run-dir", run_dir)
            while not swapping.done():
                load.round()
        swapping.result()
        for _ in range(3):  # budgets learn that it does not pay
            load.round()
        rates = [(load.round(AUTO_REGRESSIVE), load.round()) for _ in range(repeats)]
        swap("--back", "--run-dir", run_dir)
        load.round()
    report: dict[str, Any] = {
        "streams": streams,
        "requests": load.requests,
        "failures": load.failures,
        "different_answers": load.differences,
        "tokens_per_s_auto_regressive": round(median(plain for plain, _ in rates), 1),
        "tokens_per_s_random_drafter": round(median(drafted for _, drafted in rates), 1),
        "ratio": round(median(drafted / plain for plain, drafted in rates), 3),
    }
    table = Table("a random drafter", ["", "figure"])
    table.rows += [[name, str(value)] for name, value in report.items()]
    finish(output, report, table)


if __name__ == "__main__":
    run(main)
