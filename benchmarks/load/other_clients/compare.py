"""LiteLLM, LangChain, AIPerf and GuideLLM against a running `/v1`, each with its own numbers, beside our load test's.

    python -m benchmarks.load.other_clients.compare --environment artifacts/clients --bundle artifacts/engines/NAME

The environment has what requirements-clients.txt names. The clients run one after the other and send the
same prompts, --concurrency at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, PromptsFile, Report, run
from redraft.loadtest.clients.base import GenerationError
from redraft.loadtest.clients.connect import address
from redraft.loadtest.clients.openai import OpenAIServer
from redraft.loadtest.loadtest import LoadTest
from redraft.loadtest.metrics import Timeline, summarize
from redraft.loadtest.options import Options, check
from redraft.loadtest.results import save_report
from redraft.loadtest.tables import Table, number
from redraft.prompts import load_prompts, spread

ASK = Path(__file__).with_name("ask.py")
OURS = "load test"
VERSIONS = {"LiteLLM": "litellm", "LangChain": "langchain-openai", "AIPerf": "aiperf", "GuideLLM": "guidellm"}
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
"""Nothing is fetched from elsewhere: the tokenizer is the bundle's."""
TIMEOUT_S = 1800
console = Console()


class ClientError(RuntimeError):
    """A client that did not end well; the text is the end of what it wrote."""


@dataclass(frozen=True)
class Setting:
    """What every client is given."""

    environment: Path
    url: str
    model: str
    bundle: Path
    prompts: list[str]
    max_tokens: int
    concurrency: int

    def run(self, program: str, *arguments: str | Path, given: str | None = None) -> str:
        """A program of the clients' environment; its standard output. Raises ClientError."""
        command = [str(self.environment / "bin" / program), *map(str, arguments)]
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | OFFLINE
        )
        if done.returncode:
            raise ClientError(f"{program}: status {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
        return done.stdout


@dataclass(frozen=True)
class Figures:
    """What a client says about its requests; milliseconds are means."""

    requests: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def ours(setting: Setting, folder: Path) -> Figures:
    """Our load test, from its first request to its last."""
    options = Options(
        protocol="openai", url=setting.url, model_name=setting.model, metrics_url="", bundle=setting.bundle,
        prompts=_write(folder, setting.prompts, "prompt"), num_prompts=len(setting.prompts),
        request_rate=[math.inf], max_concurrency=setting.concurrency, max_tokens=setting.max_tokens, runs=1,
        warm_up=1, label=OURS, output=folder / "ours",
    )  # fmt: skip
    (run,) = asyncio.run(LoadTest(options, check(options)).measure())
    return _of_summary(run.summary)


def asked(name: str) -> Callable[[Setting, Path], Figures]:
    """LiteLLM or LangChain: the times at which their pieces came."""

    def measure(setting: Setting, folder: Path) -> Figures:
        arguments = ASK, name, setting.url, setting.model, str(setting.max_tokens), str(setting.concurrency)
        answers = json.loads(setting.run("python", *arguments, given=json.dumps(setting.prompts)))
        if empty := sum(not answer["text"] for answer in answers):
            raise ClientError(f"{empty} of {len(answers)} answers are empty")
        timelines = [
            Timeline(
                "", "", due=one["sent"], sent=one["sent"], chunk_times=one["pieces"], finished=one["finished"],
                output_tokens=one["tokens"],
            )
            for one in answers
        ]  # fmt: skip
        return _of_summary(summarize(timelines))

    return measure


def aiperf(setting: Setting, folder: Path) -> Figures:
    """AIPerf."""
    fields = {"max_tokens": setting.max_tokens, "temperature": 0}
    setting.run(
        "aiperf", "profile", "--model", setting.model, "--url", setting.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", setting.bundle, "--use-server-token-count", "--custom-dataset-type", "single_turn",
        "--input-file", _write(folder, setting.prompts, "text"), "--request-count", str(len(setting.prompts)),
        "--concurrency", str(setting.concurrency), "--output-artifact-dir", folder / "aiperf", "--ui", "none",
        "--no-server-metrics", "--no-gpu-telemetry",
        *(word for name, value in fields.items() for word in ("--extra-inputs", f"{name}:{value}")),
    )  # fmt: skip
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    return Figures(
        round(report["request_count"]["avg"]),
        report["request_throughput"]["avg"],
        report["output_token_throughput"]["avg"],
        report["time_to_first_token"]["avg"],
        report["inter_token_latency"]["avg"],
    )


def guidellm(setting: Setting, folder: Path) -> Figures:
    """GuideLLM."""
    backend = {
        "kind": "openai_http",
        "target": setting.url,
        "model": setting.model,
        "request_format": "/v1/chat/completions",
        "stream": True,
        "max_tokens": setting.max_tokens,
        "extras": {"body": {"temperature": 0}},
    }
    output = folder / "guidellm.json"
    setting.run(
        "guidellm", "run", "--backend", json.dumps(backend), "--disable-console",
        "--profile", f"kind=concurrent,streams={setting.concurrency}",
        "--constraint", f"kind=max_requests,count={len(setting.prompts)}",
        "--tokenizer", f"kind=huggingface_auto,model={setting.bundle}",
        "--data", f"kind=json_file,path={_write(folder, setting.prompts, 'prompt')}",
        "--output", f"kind=json,path={output}",
    )  # fmt: skip
    (benchmark,) = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]

    def mean(name: str) -> float:
        return metrics[name]["successful"]["mean"]

    return Figures(
        metrics["request_totals"]["successful"],
        mean("requests_per_second"),
        mean("output_tokens_per_second"),
        mean("time_to_first_token_ms"),
        mean("inter_token_latency_ms"),
    )


CLIENTS: dict[str, Callable[[Setting, Path], Figures]] = {
    OURS: ours,
    "LiteLLM": asked("litellm"),
    "LangChain": asked("langchain"),
    "AIPerf": aiperf,
    "GuideLLM": guidellm,
}


def _write(folder: Path, prompts: list[str], field: str) -> Path:
    path = folder / f"{field}.jsonl"
    path.write_text("".join(json.dumps({field: prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def _of_summary(summary: dict[str, Any]) -> Figures:
    ttft, tpot = ((summary[name] or {}).get("mean", 0.0) for name in ("ttft_ms", "tpot_ms"))
    rates = summary["request_throughput"], summary["output_token_throughput"]
    return Figures(summary["completed"], *rates, ttft, tpot)


async def model_name(url: str) -> str:
    """The name of the model at `url`. Raises GenerationError where no server answers."""
    server = OpenAIServer(url)
    try:
        if not await server.is_live():
            raise GenerationError(f"no server at {url}: `make serve` or `redraft serve` starts one")
        return server.model
    finally:
        await server.close()


def table(report: dict[str, Any]) -> Table:
    """A line per client."""
    title = "Clients of /v1: the same {prompts} prompts, {concurrency} at a time, at most {max_tokens} tokens".format(
        **report["setting"]
    )
    made = Table(title, ["client", "requests", "requests/s", "tokens/s", "TTFT, ms", "TPOT, ms"])
    for name, figures in report["clients"].items():
        version = f" {report['versions'][name]}" if name in report["versions"] else ""
        numbers = (figures["requests_per_s"], figures["tokens_per_s"], figures["ttft_ms"], figures["tpot_ms"])
        made.rows.append([f"{name}{version}", f"{figures['requests']}", *(number(value, 2) for value in numbers)])
    return made


def main(
    bundle: BundleFolder,
    environment: Annotated[Path, typer.Option(help="Virtual environment of the clients.")] = Path("artifacts/clients"),
    url: Annotated[str, typer.Option(help="Address of /v1.")] = "127.0.0.1:8003",
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, spread evenly over the file.")] = 24,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 2,
    output: Report = Path("artifacts/reports/other_clients.json"),
) -> int:
    """Run every client; the exit status is 1 where one fails or answers fewer requests than it was given."""
    failed: dict[str, str] = {}
    done: dict[str, Figures] = {}
    try:
        texts = [prompt.turns[0] for prompt in spread(load_prompts(prompts), num_prompts)]
        url = address("openai", url)
        model = asyncio.run(model_name(url))
        setting = Setting(environment, url, model, bundle.resolve(), texts, max_tokens, concurrency)
        installed = json.loads(setting.run("pip", "list", "--format", "json", "--disable-pip-version-check"))
    except (ValueError, OSError, GenerationError, ClientError) as error:
        raise typer.BadParameter(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        for name, measure in CLIENTS.items():
            console.rule(name)
            try:
                done[name] = measure(setting, Path(folder))
                if done[name].requests != len(texts):
                    failed[name] = f"{done[name].requests} of {len(texts)} requests ended"
            except (ClientError, GenerationError, OSError, subprocess.TimeoutExpired) as error:
                failed[name] = str(error)
    versions = {one["name"].lower(): one["version"] for one in installed}
    report = {
        "setting": {
            "prompts": len(texts),
            "concurrency": concurrency,
            "max_tokens": max_tokens,
            "model": model,
        },
        "versions": {name: versions.get(package, "") for name, package in VERSIONS.items()},
        "clients": {name: asdict(figures) for name, figures in done.items()},
        "failed": failed,
    }
    save_report(output, report)
    table(report).show(console)
    for name, why in failed.items():
        console.print(f"[red]{name} failed: {why}", markup=True, highlight=False)
    return int(bool(failed))


if __name__ == "__main__":
    run(main)
