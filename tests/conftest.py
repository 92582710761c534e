"""What tests of several folders share: the real model, fetched once, and bundles built from it."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from redraft.plugins.library import BuildError, kernels_path
from tests.exports import share

ROOT = Path(__file__).parents[1]
OF_TESTS = ROOT / "artifacts" / "tests"
"""What tests fetch and build once and keep. They read nothing that a user has fetched, built or tuned."""
DEFAULT = "SmolLM2-135M-Instruct"
slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case of a parametrized test that `make test` leaves out."""

with suppress(ImportError):  # a GPU machine may lack it
    from hypothesis import settings

    settings.load_profile("ci")  # the same examples in each run, which may take any time

# The tests' own makes are no children of the `make test` that runs them: they inherit no options and print no folders.
for inherited in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"):
    os.environ.pop(inherited, None)


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrized test, of which all but the `quick` ones are slow."""
    return [case if case in quick else slow(case) for case in cases]


USUAL_S = 0.15
"""What the work of `slowness` takes where limits of time in tests were chosen."""


def slowness(clock: Callable[[], float]) -> float:
    """How many times longer than usual a fixed piece of work takes by a clock; at least 1."""
    begun, total = clock(), 0
    for number in range(1_000_000):
        total += number % 7
    return max((clock() - begun) / USUAL_S, 1.0)


@cache
def processor_slowness() -> float:
    """How many times slower than usual this machine's processor is, whatever else it does."""
    return slowness(time.process_time)


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Fails where what is inside takes more than `limit` seconds of a usual processor: quadratic work does, on a slow
    machine too, and linear work does not."""
    begun = time.process_time()
    yield
    taken = (time.process_time() - begun) / processor_slowness()
    assert taken < limit, f"{taken:.1f} s of a usual processor"


@contextmanager
def waits_at_most(limit: float) -> Iterator[None]:
    """Fails where what is inside takes more than `limit` seconds of a usual machine that does nothing else."""
    before, begun = slowness(time.monotonic), time.monotonic()
    yield
    taken = time.monotonic() - begun
    taken /= max(before, slowness(time.monotonic))
    assert taken < limit, f"{taken:.1f} s of a usual machine"


def wait_until(condition: Callable[[], bool], timeout: float = 600.0) -> None:
    """Wait for a condition; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.02)


def run_script(*arguments: str | Path) -> None:
    """Run one of the repository's scripts with this interpreter, from the root; a failure shows its output."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def exit_code_of(work: Callable[[], object]) -> int | None:
    """Run `work` in a forked process, which may end itself. A process that is started anew would first import torch for
    seconds."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(600)
    if child.is_alive():
        child.kill()
    return child.exitcode


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` only files and folders that have such tests: others import packages that a GPU machine may lack."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(re.search("mark.gpu|run_kernel", file.read_text()) for file in files) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: one that began last would run while the other workers have nothing to do."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@contextmanager
def one_process() -> Iterator[None]:
    """Where test processes run side by side, one at a time prepares what they share."""
    OF_TESTS.mkdir(parents=True, exist_ok=True)
    with (OF_TESTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_exports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each network is exported once in a run."""
    own = tmp_path_factory.getbasetemp()
    share((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "exports")


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> None:
    """The CPU operators are compiled before any test begins. Where they are not there, that takes minutes of a slow
    machine, and the first request that samples would wait for it in a test with a time limit."""
    with suppress(BuildError):  # without a compiler the tests that need them say so
        kernels_path()


@pytest.fixture(scope="session", autouse=True)
def timings_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a stand-in for TensorRT measures stays out of the product's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.compiler.writers.engine_builder.CACHE", tmp_path_factory.mktemp("timings"))
        yield


@pytest.fixture(scope="session", autouse=True)
def time_to_compile() -> Iterator[None]:
    """A guide is not refused because the machine stood still for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.grammar.trial.COMPILE_S", 60.0)
        patch.setattr("redraft.grammar.trial.PATIENCE_S", 600.0)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default target's folder, fetched for the tests only: a user may have fetched theirs with another template."""
    folder = OF_TESTS / "models" / DEFAULT
    with one_process():
        if not (folder / "source.json").exists():
            run_script("build/fetch_model.py", "--output", folder.parent)
    return folder


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2: Path) -> Path:
    """The default target with its shipped drafter in bf16."""
    folder = OF_TESTS / "engines" / f"{DEFAULT}-redrafter-bf16"
    options = ["--model", smollm2, "--drafter", ROOT / "drafters" / DEFAULT, "--precision", "bf16"]
    options += ["--output", folder, "--replace"]
    with one_process():
        run_script("build/build_engines.py", *options)
    return folder
