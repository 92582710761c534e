"""`redraft serve`, `swap`, `stop`, `status` and `generate`: start a service, ask it, look at it and end it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from redraft.cli.flags import with_settings
from redraft.cli.options import MethodOption, SeedOption, TemperatureOption, TopPOption
from redraft.console.interrupt import interruptible
from redraft.console.output import err, fail, out
from redraft.console.progress import heartbeat, write
from redraft.console.template_options import TemplateOptions
from redraft.home import HOME
from redraft.learning.generations import Generation
from redraft.request import INT32_MAX, InvalidRequest, request
from redraft.serving import launcher
from redraft.serving.processes import ServingError, owned_processes
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import API_KEY_VARIABLE, ServeSettings, toml
from redraft.worker.client import WorkerClient, WorkerError

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


@with_settings
@interruptible("redraft serve", "nothing is left running")
def serve(
    settings: ServeSettings,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay and print the logs until the service ends, as containers want.")
    ] = False,
) -> None:
    """Serve a model, or a bundle. Returns when a real request has succeeded.

    Each setting is a flag, an environment variable REDRAFT_NAME, or a line of the file that --config names, in this
    order: a flag goes before a variable, and a variable before the file. `redraft status --config` prints them.
    """
    if settings.api_key:
        os.environ[API_KEY_VARIABLE] = settings.api_key.get_secret_value()
    try:
        if settings.bundle is None:
            from redraft.cli.prepare import prepared  # a bundle that is there does not wait for the import

            launcher.check(settings, run_dir)
            settings = settings.model_copy(update={"bundle": prepared(settings)})
        with _activities() as say:
            state = launcher.serve(settings, run_dir, say)
        _say_ready(state.settings, run_dir)
        if foreground and (reason := launcher.stay(run_dir, lambda text: out.print(text, end="", markup=False))):
            fail(f"redraft serve: {reason}")
    except ServingError as error:
        fail(f"redraft serve: {error}")
    except KeyboardInterrupt:
        try:
            # It may have come when the service was ready, and before all of that was said.
            launcher.end(run_dir, only_own=True)
        except ServingError as error:
            fail(f"redraft serve: interrupted, but the service may still run: {error}")
        raise


def _say_ready(settings: ServeSettings, run_dir: Path) -> None:
    """Print where the service answers."""
    host = settings.address
    mode = "streaming (decoupled)" if settings.decoupled else "one response per request"
    out.print(f"serving {settings.bundle.name}, {mode}", markup=False)
    out.print(f"  bundle   {settings.bundle}", markup=False)
    out.print(f"  HTTP     http://{host}:{settings.http_port}/v2/models/ensemble/generate")
    out.print(f"  gRPC     {host}:{settings.grpc_port}")
    out.print(f"  metrics  http://{host}:{settings.metrics_port}/metrics")
    if settings.openai_port:
        out.print(f"  OpenAI   http://{host}:{settings.openai_port}/v1")
        out.print(f"  page     http://{host}:{settings.openai_port}/")
    out.print(f"  logs     {RunDir(run_dir).path}", markup=False)


@interruptible("redraft swap", "the swap goes on: `redraft status` says how it is")
def swap(
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Engine bundle to serve from now on, with the same tokenizer. Default: none."
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Drafter to serve the same model with from now on; its bundle is built first. Default: none.",
        ),
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Serve the bundle again that was served before.")] = False,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Serve another bundle without losing a request. Returns when the old one's last request has ended.

    It loads beside the old one. Where that fails, the old one serves on and the exit status is 1.
    """
    if sum((bundle is not None, drafter is not None, back)) != 1:
        fail("redraft swap: give one of --bundle FOLDER, --drafter FOLDER and --back", 2)
    if drafter:
        served = running_service(run_dir, "redraft swap").bundle
        from redraft.cli.drafter_swap import with_drafter  # other swaps do not wait for the import

        bundle = with_drafter(served, drafter.resolve(), "redraft swap")
    try:
        with _activities() as say:
            state = launcher.swap(bundle, run_dir, say)
    except ServingError as error:
        fail(f"redraft swap: {error}")
    out.print(f"serving {_described(state.settings.bundle)}", markup=False)


def _described(bundle: Path) -> str:
    """A bundle's name, and the generation of its drafter where it has one."""
    generation = Generation.of(bundle)
    return bundle.name + (f", whose drafter is generation {generation.number}" if generation else "")


def stop(run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """End the service when its running requests have ended, or after `serve --drain-s`. A second call ends it at once.

    No process and no shared memory is left.
    """
    try:
        count = launcher.stop(run_dir)
    except ServingError as error:
        fail(f"redraft stop: {error}")
    out.print(f"stopped ({count} processes)" if count else "nothing was running")


def status(
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    config: Annotated[
        bool, typer.Option("--config", help="Print the settings in force instead, as `serve --config` takes them.")
    ] = False,
) -> None:
    """Say how the service is. The exit status is 0 if it is ready."""
    state, running = _look(run_dir)
    if state is None or not running:
        left = len(owned_processes(RunDir(run_dir).path))
        out.print("not running" + (f", but {left} processes are left: `redraft stop` ends them" if left else ""))
        if state and state.error:
            out.print(state.error, markup=False)
        raise typer.Exit(1)
    if config:
        out.print(toml(state.settings), end="", markup=False)
        return
    out.print(f"{state.phase}: {state.detail}" if state.detail else state.phase, markup=False)
    out.print(f"  bundle   {state.settings.bundle}", markup=False)
    if generation := Generation.of(state.settings.bundle):
        out.print(f"  drafter  generation {generation.number}")
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
    raise typer.Exit(0 if state.phase == "ready" else 1)


def generate(
    text: Annotated[str, typer.Argument(help="What to say to the model.")],
    max_tokens: Annotated[int, typer.Option(min=1, max=INT32_MAX, help="Tokens of the answer at most.")] = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    method: MethodOption = None,
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template, or continue the text as it is.")] = True,
    chat_template_kwargs: TemplateOptions = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Ask the running service. Prints its answer as it comes, then a line of statistics."""
    from redraft.chat import Writing, render_chat  # `serve` does not wait for the import

    settings = running_service(run_dir, "redraft generate")
    options = settings.default_chat_template_kwargs | (chat_template_kwargs or {})
    try:
        prompt = render_chat(settings.bundle, text, Writing(options)) if chat else text
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


def running_service(path: Path, program: str) -> ServeSettings:
    """The settings of the service at a run directory; ends the process where none runs."""
    state, running = _look(path)
    if state is None or not running:
        fail(f"{program}: no service is running: `redraft serve` starts one")
    return state.settings


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
