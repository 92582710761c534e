"""`redraft serve`, `status`, `generate` and `stop`: one line and an exit code for each failure.

The slow cases start a service. They would catch a traceback instead of a line that names the flag.
"""

from __future__ import annotations

import fcntl
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import typer

from redraft.cli.service import status
from redraft.console import progress
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings
from tests.cli.commands import run_command
from tests.conftest import wait_until
from tests.serving.lifecycle.starting import redraft


def test_nothing_is_running(tmp_path):
    run_dir = ["--run-dir", str(tmp_path)]
    status = run_command(["status", *run_dir])
    assert (status.exit_code, status.output) == (1, "not running\n")
    failed = run_command(["serve", "--bundle", str(tmp_path / "none"), *run_dir])
    assert (failed.exit_code, "is not a bundle" in failed.output) == (1, True)
    stop = run_command(["stop", *run_dir])
    assert (stop.exit_code, stop.output) == (0, "nothing was running\n")


@pytest.mark.slow
def test_the_version():
    assert redraft("--version").communicate()[0] == f"redraft {metadata.version('redraft')}\n"


def test_a_status_says_a_word_once(tmp_path, fake_bundle, capsys, monkeypatch):
    """Whatever the run directory is called."""
    run_dir = RunDir(tmp_path / "[/red]")
    run_dir.create()
    run_dir.write_state(State(detail="loading Triton's models", settings=ServeSettings(bundle=fake_bundle)))
    monkeypatch.setattr(launcher, "is_running", lambda _: True)
    with pytest.raises(typer.Exit):
        status(run_dir.path)
    assert capsys.readouterr().out.startswith("starting: loading Triton's models\n")


def test_a_start_that_takes_long_is_seen_in_a_log(tmp_path, fake_bundle, monkeypatch):
    write, lines = progress.write, []

    def slow(wanted: ServeSettings, folder: Path, on_progress) -> None:
        on_progress("loading a large bundle")
        wait_until(lambda: lines.count("still loading a large bundle") >= 2)
        raise ServingError("enough")

    monkeypatch.setattr(progress, "write", lambda console, line: (write(console, line), lines.append(line)))
    monkeypatch.setattr(progress, "LINE_S", 0.1)
    monkeypatch.setattr(launcher, "serve", slow)
    done = run_command(["serve", "--bundle", str(fake_bundle), "--run-dir", str(tmp_path)])
    assert done.output.count("loading a large bundle") > 2


def test_a_key_of_spaces_is_no_open_door(tmp_path, fake_bundle):
    flags = ["serve", "--bundle", str(fake_bundle), "--run-dir", str(tmp_path)]
    done = run_command(flags, env={"REDRAFT_API_KEY": "  "})
    assert done.exit_code == 2
    assert "REDRAFT_API_KEY: it holds spaces only" in done.output


@pytest.mark.parametrize("damage", ["missing", "{"])
def test_a_running_service_without_its_state(tmp_path, damage):
    """One line, with the remedy."""
    run_dir = RunDir(tmp_path)
    if damage != "missing":
        run_dir.state_file.write_text(damage)
    with run_dir.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["status"], ["generate", "hi"]):
            done = run_command([*command, "--run-dir", str(tmp_path)])
            assert done.exit_code == 1
            assert "state.json is missing or damaged" in done.output
            assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("command", "place"),
    [("status", "file"), ("stop", "file/below"), ("serve", "circle"), ("generate", "file"), ("serve", "file/below")],
)
def test_a_run_directory_that_is_a_file(tmp_path, fake_bundle, command, place):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    arguments = {"serve": ["--bundle", str(fake_bundle)], "generate": ["hi"]}.get(command, [])
    done = run_command([command, *arguments, "--run-dir", str(tmp_path / place)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert re.fullmatch(r"redraft.*cannot use the run directory .*--run-dir.*\n", done.output)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status"], ["stop"], ["generate", "hi"]])
def test_another_users_service(service, monkeypatch, command):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    done = run_command([*command, "--run-dir", str(service.run_dir.path)])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert re.fullmatch(r"redraft.*belongs to another user, and only that user sees and stops its.*\n", done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--max-tokens", "4294967297"], "--max-tokens"),
        (["generate", "hi", "--seed", str(2**64)], "--seed"),
        (["generate", "hi", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs"),
        (["chat", "b", "--chat-template-kwargs", "x"], "--chat-template-kwargs"),
        (["serve", "--bundle", "b", "--start-timeout-s", "inf"], "--start-timeout-s"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_option(arguments, message):
    done = run_command(arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
def test_generate_prints_the_answer_and_a_line_of_statistics(service):
    arguments = ["generate", "--no-chat", "hi", "--max-tokens", "3", "--run-dir", str(service.run_dir.path)]
    done = run_command(arguments)
    assert (done.exit_code, done.stdout) == (0, " w0é w1é w2é\n")
    assert re.fullmatch(r"3 tokens in .* tokens/step, .* drafted tokens accepted\n", done.stderr)


@pytest.mark.slow
def test_what_generate_cannot_send(service):
    for arguments, message in (
        (["hi"], "no chat_template.jinja .*--no-chat"),
        (["--no-chat", "\udcff"], "not valid UTF-8"),
        (["--no-chat", "hi", "--temperature", "nan"], "generate: temperature: .*got nan"),
    ):
        done = run_command(["generate", *arguments, "--run-dir", str(service.run_dir.path)])
        assert (done.exit_code, type(done.exception)) == (1, SystemExit)
        assert re.search(message, done.output)
