"""`redraft serve`, `swap`, `stop`, `status` and `generate`: start a service, ask it, look at it and end it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from redraft.bundle.backends import OPENVINO, Backend, Precision
from redraft.bundle.budget import BudgetFile, doubtful_warning, untuned_warning
from redraft.chat import Writing, render_chat
from redraft.cli.options import BACKEND_NAMES, backend_named
from redraft.cli.prepare import DEFAULT, prepared
from redraft.console.output import err, fail, out
from redraft.console.progress import heartbeat, write
from redraft.console.template_options import TemplateOptions, template_options
from redraft.home import HOME
from redraft.logs import FORMAT_VARIABLE, LogFormat
from redraft.openai.launch import ALLOW_HOST_VARIABLE, API_KEY_VARIABLE, Defaults, ReasoningParser, ToolParser
from redraft.request import INT32_MAX, InvalidRequest, request
from redraft.serving import launcher
from redraft.serving.foreground import stay
from redraft.serving.guard.limits import MAX_CALLS, MAX_REQUESTS
from redraft.serving.processes import ServingError, owned_processes
from redraft.serving.rundir import RunDir, Settings, State
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import DRAIN_S

RunDirOption = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        help="Where the service keeps its socket, state and logs.",
        show_default="REDRAFT_HOME/run",
    ),
]
DEFAULT_RUN_DIR = HOME / "run"
CONNECT_S = 5.0
"""How long `generate` waits for the worker's socket."""


class Address(StrEnum):
    loopback = "127.0.0.1"
    every = "0.0.0.0"


def serve(
    source: Annotated[
        str,
        typer.Argument(
            help="A bundle, or a model: a folder, a .gguf file, a hub id, or 'default'. A model is fetched, built and "
            "tuned first, where that was not done yet."
        ),
    ] = DEFAULT,
    bundle: Annotated[Path | None, typer.Option(help="Engine bundle to serve as it is, instead of SOURCE.")] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(help="The model's drafter; default: your own of this model, or the one that ships, or n-grams."),
    ] = None,
    backend: Annotated[
        Backend,
        typer.Option(parser=backend_named, metavar=BACKEND_NAMES, help="What executes the networks of a model."),
    ] = OPENVINO,
    precision: Annotated[Precision, typer.Option(help="Stored weights of a model.")] = Precision.bf16,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that execute a model together.")] = 1,
    tune_minutes: Annotated[
        float, typer.Option(min=0, max=100_000, help="Time to tune a model's bundle in, about; 0: it is not tuned.")
    ] = 4.0,
    address: Annotated[
        Address, typer.Option(help="Where the ports are: on this machine only, or on all of its addresses.")
    ] = Address.loopback,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    openai_port: Annotated[int, typer.Option(min=0, max=65535, help="Of OpenAI's API, /v1; 0: without it.")] = 8003,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="Key that /v1 asks for, or several between spaces, one for each client. Other users can read "
            "arguments: better set the variable.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar=ALLOW_HOST_VARIABLE,
            help="Another name by which clients may reach /v1, and web pages Triton's HTTP too; '*': any. Repeatable.",
        ),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name in /v1; default: the bundle's.")] = None,
    tool_parser: Annotated[
        ToolParser | None,
        typer.Option(help="The form of the model's tool calls, for /v1; default: the one its chat template shows."),
    ] = None,
    generation_config: Annotated[
        Defaults,
        typer.Option(
            help="How requests of /v1 that do not say it are sampled: auto, as the model's generation_config.json "
            "says; vllm, at temperature 1."
        ),
    ] = Defaults.auto,
    default_chat_template_kwargs: Annotated[
        dict | None,
        typer.Option(
            parser=template_options,
            metavar="JSON",
            help="Options of the model's chat template for requests that do not say them, such as "
            "'{\"enable_thinking\": false}'.",
        ),
    ] = None,
    sanitize_control_tokens: Annotated[
        bool,
        typer.Option(
            help="Keep control tokens that messages of /v1 spell, such as <|im_start|>, as text. Those of the chat "
            "template stay tokens."
        ),
    ] = False,
    reasoning_parser: Annotated[
        ReasoningParser | None,
        typer.Option(
            help="The marks of the model's thoughts, for /v1; none: they stay in the text; default: those its chat "
            "template shows."
        ),
    ] = None,
    decoupled: Annotated[bool, typer.Option(help="Streaming models, or one response per request.")] = True,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the engine, of each rank; default: all cores, or a rank's share."),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Waiting requests before 'overloaded'. Triton's ports take at most "
            f"{MAX_REQUESTS} requests over HTTP and {MAX_CALLS} calls over gRPC at a time, streams included.",
        ),
    ] = None,
    max_per_client: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of one client of /v1 that run and wait before 'overloaded': of an address or, where there "
            "are several keys, of a key.",
        ),
    ] = None,
    stream_interval_ms: Annotated[
        int | None, typer.Option(min=0, max=10_000, help="Least time between two pieces of a stream; default: 40.")
    ] = None,
    prefix_reuse: Annotated[
        bool, typer.Option(help="Prefill a prompt that begins like an earlier one only from where they differ.")
    ] = True,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Machines of a tensor-parallel bundle's ranks, lines HOST:RANKS, this one first."),
    ] = None,
    start_timeout_s: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="A worker that is not ready after so many seconds has failed."),
    ] = 180.0,
    silence_s: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="A worker that does not answer for so many seconds is restarted."),
    ] = 30.0,
    triton_silence_s: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="So is a Triton server that does not answer for so many seconds."),
    ] = 10.0,
    drain_s: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds that running requests have to end when it is stopped.")
    ] = DRAIN_S,
    log_format: Annotated[
        LogFormat,
        typer.Option(envvar=FORMAT_VARIABLE, help="Lines of text or, except Triton's, of JSON objects."),
    ] = LogFormat.text,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay and print the logs until the service ends, as containers want.")
    ] = False,
) -> None:
    """Serve a model, or a bundle. Returns when a real request has succeeded."""
    if foreground:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if api_key:
        if api_key.isspace():
            fail("redraft serve: --api-key holds spaces only: expected a key, or several between spaces")
        os.environ[API_KEY_VARIABLE] = api_key
    if bundle is None:
        bundle = prepared(source, drafter, str(backend), precision.value, tp, tune_minutes)
    settings = Settings(
        bundle=bundle,
        address=address.value,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        openai_port=openai_port,
        model_name=model_name,
        tool_parser=tool_parser,
        generation_config=generation_config.value,
        chat_template_kwargs=default_chat_template_kwargs or {},
        sanitize_control_tokens=sanitize_control_tokens,
        reasoning_parser=reasoning_parser,
        allowed_hosts=allow_host or [],
        decoupled=decoupled,
        threads=threads,
        max_queue=max_queue,
        max_per_client=max_per_client,
        stream_interval_ms=stream_interval_ms,
        prefix_reuse=prefix_reuse,
        hostfile=hostfile,
        start_timeout_s=start_timeout_s,
        silence_s=silence_s,
        triton_silence_s=triton_silence_s,
        drain_s=drain_s,
        log_format=log_format,
    )
    try:
        with _activities() as say:
            state = launcher.serve(settings, run_dir, say)
    except ServingError as error:
        fail(f"redraft serve: {error}")
    except KeyboardInterrupt:
        fail("redraft serve: interrupted, nothing is left running", code=130)
    mode = "streaming (decoupled)" if decoupled else "one response per request"
    out.print(f"serving {state.settings.bundle.name}, {mode}", markup=False)
    out.print(f"  bundle   {state.settings.bundle}", markup=False)
    out.print(f"  HTTP     http://{address.value}:{http_port}/v2/models/ensemble/generate")
    out.print(f"  gRPC     {address.value}:{grpc_port}")
    out.print(f"  metrics  http://{address.value}:{metrics_port}/metrics")
    if openai_port:
        out.print(f"  OpenAI   http://{address.value}:{openai_port}/v1")
        out.print(f"  page     http://{address.value}:{openai_port}/")
    out.print(f"  logs     {RunDir(run_dir).path}", markup=False)
    _warn_of_budgets(state.untuned, state.settings.bundle)
    if foreground and (reason := stay(run_dir, lambda text: out.print(text, end="", markup=False))):
        fail(f"redraft serve: {reason}")


def swap(
    bundle: Annotated[Path, typer.Option(help="Engine bundle to serve from now on, with the same tokenizer.")],
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Serve another bundle without losing a request. Returns when the old one's last request has ended.

    It loads beside the old one. Where that fails, the old one serves on and the exit status is 1.
    """
    try:
        with _activities() as say:
            state = launcher.swap(bundle, run_dir, say)
    except ServingError as error:
        fail(f"redraft swap: {error}")
    except KeyboardInterrupt:
        fail("redraft swap: interrupted, the swap goes on: `redraft status` says how it is", code=130)
    out.print(f"serving {state.settings.bundle.name}", markup=False)
    _warn_of_budgets(state.untuned, state.settings.bundle)


def stop(run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """End the service when its running requests have ended, or after `serve --drain-s`. A second call ends it at once.

    No process and no shared memory is left.
    """
    try:
        count = launcher.stop(run_dir)
    except ServingError as error:
        fail(f"redraft stop: {error}")
    out.print(f"stopped ({count} processes)" if count else "nothing was running")


def status(run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Say how the service is. The exit status is 0 if it is ready."""
    state, running = _look(run_dir)
    if state is None or not running:
        left = len(owned_processes(RunDir(run_dir).path))
        out.print("not running" + (f", but {left} processes are left: `redraft stop` ends them" if left else ""))
        if state and state.error:
            out.print(state.error, markup=False)
        raise typer.Exit(1)
    out.print(f"{state.phase}: {state.detail}" if state.detail else state.phase, markup=False)
    out.print(f"  bundle   {state.settings.bundle}", markup=False)
    if state.swap and state.swap.phase != "done":
        out.print(
            f"  swap     to {state.swap.order.bundle}: {state.swap.phase} {state.swap.error}".rstrip(), markup=False
        )
    out.print(f"  ports    HTTP {state.settings.http_port}, gRPC {state.settings.grpc_port}, "
              f"metrics {state.settings.metrics_port}, OpenAI {state.settings.openai_port or 'off'}")  # fmt: skip
    out.print(f"  worker   pid {state.worker_pid}, restarts {state.worker_restarts}")
    if state.rank_pids:
        out.print("  ranks    " + ", ".join(f"{rank}: pid {pid}" for rank, pid in state.rank_pids.items()))
    if state.last_failure:
        out.print(f"  failed   {state.last_failure}", markup=False)
    out.print(f"  Triton   pid {state.triton_pid}, restarts {state.triton_restarts}")
    out.print(f"  guard    pid {state.guard_pid}, restarts {state.guard_restarts}")
    if state.openai_pid:
        out.print(f"  OpenAI   pid {state.openai_pid}, restarts {state.openai_restarts}")
    _warn_of_budgets(state.untuned, state.settings.bundle)
    raise typer.Exit(0 if state.phase == "ready" else 1)


def generate(
    text: Annotated[str, typer.Argument(help="What to say to the model.")],
    max_tokens: Annotated[int, typer.Option(min=1, max=INT32_MAX)] = 128,
    temperature: Annotated[float | None, typer.Option(help="Absent: greedy decoding.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Applies with a temperature only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1)] = None,
    method: Annotated[str | None, typer.Option(help="A drafting method of the bundle, or auto_regressive.")] = None,
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template, or continue the text as it is.")] = True,
    chat_template_kwargs: TemplateOptions = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Ask the running service. Prints its answer as it comes, then a line of statistics."""
    state, running = _look(run_dir)
    if state is None or not running:
        fail("redraft generate: no service is running: `make serve` starts one, or `redraft serve --bundle PATH`")
    options = state.settings.chat_template_kwargs | (chat_template_kwargs or {})
    try:
        prompt = render_chat(state.settings.bundle, text, Writing(options)) if chat else text
        prompt.encode()
    except UnicodeEncodeError:
        fail("redraft generate: the text is not valid UTF-8: set LANG to a UTF-8 locale, or write it in UTF-8")
    except (OSError, ValueError) as error:
        fail(f"redraft generate: {error}; --no-chat continues the text as it is")
    begun = False
    try:
        wanted = request(
            prompt,
            max_tokens,
            stream=True,
            add_special_tokens=not chat,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            method=method,
        )
        with WorkerClient(RunDir(run_dir).socket) as client:
            client.wait_connected(CONNECT_S)
            for chunk in client.generate(wanted):
                out.print(chunk.text, end="", markup=False)
                stats, begun = chunk.stats, True
    except KeyboardInterrupt:
        fail("", code=130)
    except (InvalidRequest, WorkerError) as error:
        fail("\n" * begun + f"redraft generate: {error}")
    out.print()
    err.print(str(stats), markup=False)


def _look(path: Path) -> tuple[State | None, bool]:
    """The last state of the service at a run directory, and whether it runs; if it does, there is a state."""
    try:
        run_dir = RunDir(path)
        running = launcher.is_running(run_dir)
    except ServingError as error:
        fail(f"redraft: {error}")
    state = run_dir.read_state()
    if running and state is None:
        fail(
            f"redraft: a service runs from {run_dir.path}, but its {run_dir.state_file.name} is missing or damaged: "
            "if it stays so, `redraft stop` ends the service"
        )
    return state, running


def _warn_of_budgets(untuned: list[str], bundle: Path) -> None:
    warnings = [untuned_warning(untuned, bundle)] if untuned else []
    with suppress(OSError, ValueError):  # the service has read a table that is damaged since
        warnings += [doubtful_warning(name, table, bundle) for name, table in BudgetFile.load(bundle).doubtful.items()]
    for warning in warnings:
        out.print(f"  warning  {warning}", markup=False)


@contextmanager
def _activities() -> Iterator[Callable[[str], None]]:
    """Shows what a start is doing: in a terminal beside a spinner, in a log as it begins and while it goes on."""
    if err.is_terminal:
        with err.status("starting") as status:
            yield lambda activity: status.update(escape(activity))
        return
    doing = "starting"

    def begin(activity: str) -> None:
        nonlocal doing
        doing = activity
        write(err, activity)

    with heartbeat(lambda: f"still {doing}", err):
        yield begin
