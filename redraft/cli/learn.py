"""Train a service's drafter on with what was served, while the service is idle.

One call makes one generation: it sets apart the newest answers of the folder, trains the drafter that is served on with
the others, and judges the new drafter beside it on the newest. Where it is better beyond noise, it is swapped in.
The command can be killed at any time: called again, it goes on.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors import SafetensorError

from redraft.bundle.manifest import Manifest
from redraft.cli.drafter_swap import learned_drafter, options_with, with_drafter
from redraft.cli.options import ThreadsOption, fetched_model, model_folder
from redraft.cli.service import DEFAULT_RUN_DIR, RunDirOption
from redraft.cli.steps import Steps, execute_apart
from redraft.cli.train import KINDS
from redraft.compiler.built_from import is_input, options_of
from redraft.console.interrupt import interruptible
from redraft.console.output import fail
from redraft.console.progress import write
from redraft.errors import BundleError
from redraft.home import DEFAULT_MODEL, drafter_of
from redraft.learning.answers import remove_old
from redraft.learning.generations import (
    WAS_SERVED,
    Generation,
    Measure,
    better_one,
    generation_folder,
    last_generation,
)
from redraft.model_defs.files import read_json
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import model_digest
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings
from redraft.training.generation import (
    CHECKPOINT,
    JUDGED,
    TRAINED,
    UNROLL,
    Order,
    count_answers,
    goes_on,
    judge,
    remove_answers,
    set_apart,
)
from redraft.training.ranks import ranked, this_rank
from redraft.worker.client import WorkerClient, WorkerError

LOG = "learn.log"
GOES_ON = "the same command goes on"
IDLE_S = 2.0
"""A service is idle when it had no request for this time."""
ANSWER_S = 0.5
"""A service that does not say within this time whether it is idle is busy."""
AWAY_S = 60.0
"""After so long without an answer it is said that the service is away."""
BUSY_S = 10.0
"""After so long in which the service was not idle it is said what this waits for."""
RATE_SHARE = 0.5
"""The peak learning rate, as a share of that of a drafter which is trained from the start."""


class IdleService:
    """Whether a service has no request, and had none for IDLE_S."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]):
        """`say` is told when the service is away for the first time, and when it is busy."""
        self._run_dir, self._client = run_dir, WorkerClient(run_dir.socket)
        self._idle_since: float | None = None
        self._submitted = 0
        self._say, self._said = say, set[str]()
        self._answered: float | None = None
        self._ended: float | None = None
        """Since when no service runs"""
        self._was_idle: float | None = None

    def __call__(self) -> bool:
        """Ask the worker. One that is away is busy: it starts. Raises ServingError where no service was there for
        AWAY_S."""
        now = time.monotonic()
        try:
            status = self._client.status(ANSWER_S)
            self._answered, self._ended = now, None
            self._was_idle = (self._was_idle or now) if status.ready else None
            quiet = status.submitted == self._submitted  # a short request may have come and gone since it was asked
            idle = status.ready and quiet and not (status.running or status.waiting)
            self._submitted = status.submitted
        except WorkerError:
            idle, self._was_idle = False, None
            self._answered = self._answered or now
            self._ended = None if launcher.is_running(self._run_dir) else self._ended or now
            if self._ended is not None and now - self._ended > AWAY_S:
                raise ServingError(f"the service has ended; when it runs again, {GOES_ON}") from None
            if now - self._answered > AWAY_S:
                self._tell("the service does not answer: this waits for it, and Ctrl-C ends it")
        self._idle_since = (self._idle_since or now) if idle else None
        may_run = self._idle_since is not None and now - self._idle_since >= IDLE_S
        self._was_idle = now if may_run else self._was_idle
        if self._was_idle is not None and now - self._was_idle > BUSY_S:
            self._tell(f"the service has requests: this goes on whenever it had none for {IDLE_S:g} s")
        return may_run

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


@interruptible("redraft learn", GOES_ON)
@ranked("redraft learn", GOES_ON)
def main(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What redraft serve --learn stored.")],
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    always: Annotated[
        bool,
        typer.Option("--always", help="Train whether a service is idle or busy, or where none runs, and swap nothing."),
    ] = False,
    swap: Annotated[bool, typer.Option(help="Swap a better drafter in.")] = True,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help=f"The target: a folder made by redraft fetch, or its name; default: the service's, or "
            f"{DEFAULT_MODEL}.",
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Drafter to begin from and to be better than; default: the service's, or else the model's. Another "
            "than the service's takes --no-swap.",
        ),
    ] = None,
    mix: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Teacher data of redraft distill to train on too, so that other texts are not forgotten; may be given "
            "several times. Default: none.",
        ),
    ] = None,
    positions: Annotated[
        int, typer.Option(min=1, help="Positions to train on; the learning rate decays over them.")
    ] = 500_000,
    peak_rate: Annotated[
        float | None,
        typer.Option(min=0, max=1, help=f"Peak learning rate; default: {RATE_SHARE:g} of the drafter kind's."),
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Train the drafter on with what was served, at the lowest priority while the service is idle."""
    folder, ranks = folder.resolve(), this_rank()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    steps = Steps(
        "redraft learn",
        folder / LOG if ranks.first else None,
        console=Console(stderr=True, highlight=False, soft_wrap=True, quiet=not ranks.first),
    )

    def say(text: str) -> None:
        if ranks.first:
            write(Console(stderr=True, highlight=False, soft_wrap=True), f"redraft learn: {text}")
            steps.log(text)

    with ExitStack() as held:
        try:
            with ranks.agreement():
                may_run, settings = (lambda: True, None) if always else watched(run_dir, say)
                if ranks.first and folder.is_dir():
                    held.enter_context(only_one(folder))
                served = settings.bundle if settings else None
                policy = settings.learning if settings else None
                if ranks.first and policy and policy.folder == folder:
                    remove_old(policy.folder, policy.days, policy.gigabytes)
                model, drafter = origin(model, drafter, served, folder)
                if swap and served:
                    require_serving(served, drafter)
                    require_swap(served, drafter)
                unserved = better_one(folder, drafter) if swap and served and ranks.first else None
            if ranks.from_first(unserved is not None):
                if unserved and served:
                    say(f"{unserved} is better than what is served, and was never swapped in; --no-swap trains on")
                    swap_in(unserved, served, run_dir, steps, may_run, say)
                return
            with ranks.agreement():
                kind = read_json(drafter / "config.json").get("drafter")
                if kind not in KINDS:
                    raise ValueError(f"{drafter} holds a drafter {kind!r}: trained are {', '.join(KINDS)}")
                number = next_generation(folder) if ranks.first else 0
            number = ranks.from_first(number)
            with ranks.agreement():
                generation = generation_folder(folder, number)
                recipe = KINDS[str(kind)].recipe
                rate = RATE_SHARE * recipe.peak_rate if peak_rate is None else peak_rate
                data = [generation / TRAINED, generation / JUDGED, *(each.resolve() for each in mix or [])]
                training = [
                    "--model", model, "--kind", kind, *(word for each in data for word in ("--data", each)),
                    "--start-from", drafter, "--output", generation, "--positions", positions, "--peak-rate", rate,
                    "--unroll", UNROLL, "--window", recipe.window, "--batch", recipe.batch,
                ]  # fmt: skip
                order = Order(KINDS[str(kind)], tuple(map(str, training)), fingerprint_of(drafter, served), data[2:])
                if ranks.first and not goes_on(generation, order):
                    if (generation / CHECKPOINT).exists():
                        say(f"generation {number} begins anew: it was begun with other settings, or answers are gone")
                    set_apart(folder, generation, order, say)
                answers = count_answers(generation, order) if ranks.first else 0
            answers = ranks.from_first(answers)
            say(f"generation {number}: {answers:,} answers to train on, from {drafter}")
            run = partial(execute_apart, may_run=may_run)
            Steps("redraft learn", folder / LOG if ranks.first else None, run).run(
                "train", *training, *(["--threads", threads] if threads else [])
            )
            if not ranks.first:
                return
            if threads:
                torch.set_num_threads(threads)
            say(f"generation {number} is judged beside {drafter}")
            measure: Measure = judge(
                Target.from_folder(model), (drafter, generation), generation / JUDGED, partial(wait_until, may_run)
            )
            made = Generation(
                number=number,
                began_from=str(drafter),
                model=model_digest(model),
                positions=positions,
                answers=answers,
                measure=measure,
            )
            made.write(generation)
            remove_answers(generation)
            better = "better beyond noise" if measure.is_better else "not better beyond noise: the drafter before stays"
            say(
                f"generation {number} gains {measure.length:.2f} tokens per step of a chain, the drafter before "
                f"{measure.length_before:.2f}, on {measure.answers} new answers ({measure.gain_low:+.2f} to "
                f"{measure.gain_high:+.2f}): {better}"
            )
            if measure.is_better and swap and served:
                swap_in(generation, served, run_dir, steps, may_run, say)
            elif measure.is_better:
                say(f"`redraft swap --drafter {generation}` brings it in")
        except (OSError, ValueError, SafetensorError, BundleError, ServingError) as error:
            if folder.is_dir():
                steps.log(str(error))
            fail(f"redraft learn: {error}", 2)


def swap_in(
    generation: Path, served: Path, run_dir: Path, steps: Steps, may_run: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Build the bundle that is served with a generation's drafter, while that may run, and swap it in, unless another
    bundle is served by then."""
    with_drafter(served, generation, steps.program, partial(execute_apart, may_run=may_run))
    state = RunDir(run_dir).read_state()
    if state is None or state.settings.bundle == served:
        steps.run("swap", "--drafter", generation, "--run-dir", run_dir)
        (generation / WAS_SERVED).touch()  # whatever comes after, it is not swapped in by itself again
    else:
        since = f"{state.settings.bundle} is served by now, beside which it was not judged"
        say(f"{since}: `redraft swap --drafter {generation}` brings it in all the same")


def require_serving(served: Path, drafter: Path) -> None:
    """Raises ValueError where the bundle that is served has another drafter: a new one that is swapped in must have
    been judged beside that."""
    built = Manifest.read(served).built_from
    has_drafter = built and any(name.startswith("--drafter ") for name in built.files)
    if built and has_drafter and not is_input(built, "--drafter", drafter):
        raise ValueError(
            f"{drafter} is not the drafter that is served: --no-swap trains it on without swapping, and `redraft swap "
            f"--drafter {drafter}` serves it"
        )


def require_swap(served: Path, drafter: Path) -> None:
    """Raises BundleError where the bundle that is served could not be built with another drafter: better before the
    training than after it."""
    try:
        options_with(Manifest.read(served).command, drafter)
    except BundleError as error:
        raise BundleError(f"{error}. --no-swap trains without swapping") from None


def watched(path: Path, say: Callable[[str], None]) -> tuple[Callable[[], bool], ServeSettings]:
    """What says whether the service at a run directory is idle, and the settings that it serves by. Raises ValueError
    where none runs."""
    run_dir = RunDir(path)
    state = run_dir.read_state() if launcher.is_running(run_dir) else None
    if state is None:
        raise ValueError(
            f"no service runs from {run_dir.path}: `redraft serve --learn` starts one, and --always trains without one"
        )
    return IdleService(run_dir, say), state.settings


def origin(model: Path | None, drafter: Path | None, served: Path | None, folder: Path) -> tuple[Path, Path]:
    """The model, and the drafter to begin from: those named, or else those of the bundle that is served, or else the
    generation of the folder that was served last, or else the usual ones. Raises ValueError where there is none."""
    options = (options_of(shlex.split(Manifest.read(served).command)[2:]) or {}) if served else {}
    model = fetched_model(model or options.get("--model") or DEFAULT_MODEL)
    found = drafter or (Path(options["--drafter"]) if "--drafter" in options else None)
    found = found or (None if served else learned_drafter(folder, model) or drafter_of(model))
    if found is None or not (found / "config.json").is_file():
        what = f"the drafter {found} is gone" if found else f"{served or model_folder(model.name)} has no drafter"
        raise ValueError(f"{what}: give one to begin from as --drafter")
    return model, found.resolve()


def fingerprint_of(drafter: Path, served: Path | None) -> str | None:
    """The target of a drafter, or else of the bundle that is served; None where neither says it."""
    known = read_json(drafter / "config.json").get("target_fingerprint")
    return str(known) if known else Manifest.read(served).target_fingerprint if served else None


def next_generation(folder: Path) -> int:
    """The number of the generation that is to be made: the last one where it is not complete, or else the next. Of one
    that is complete nothing stays that only its making needed, also where that was killed at its end."""
    last = last_generation(folder)
    if last and Generation.of(generation_folder(folder, last)) is None:
        return last
    if last:
        remove_answers(generation_folder(folder, last))
    return last + 1


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Learn from a folder in no other process meanwhile. Raises ValueError where one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another `redraft learn` is at work in {folder}") from None
        yield
    finally:
        os.close(descriptor)


def wait_until(may_run: Callable[[], bool]) -> None:
    """Wait until work may go on."""
    while not may_run():
        time.sleep(IDLE_S / 4)
