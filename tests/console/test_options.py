"""Options of the commands that are numbers."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from redraft import cli
from redraft.cli import build, distill, drafter, train, tune
from redraft.console.program import run
from redraft.serving import commands


def app_of(command) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


TUNE = ["--bundle", "b", "--prompts", "p"]
TRAIN = ["--model", "m", "--data", "d", "--output", "o"]
PLAN = ["plan", "p", "--model", "m", "--engine", "e", "--teacher", "t"]


@pytest.mark.parametrize(
    ("app", "arguments", "option"),
    [
        (app_of(tune.main), TUNE, "--minutes"),
        (drafter.app, PLAN, "--hours"),
        (app_of(distill.main), ["--model", "m", "--output", "o"], "--self-written"),
        (app_of(train.main), TRAIN, "--peak-rate"),
        (app_of(train.main), TRAIN, "--hidden-weight"),
        (app_of(commands.serve), ["--bundle", "b"], "--start-timeout-s"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_what_is_no_number_is_refused(app, arguments, option, value):
    done = CliRunner().invoke(app, [*arguments, option, value])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("command", ["chat", "doctor", "serve", "swap", "stop", "status", "generate"])
def test_every_option_is_readable_in_a_narrow_terminal(command):
    done = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert done.exit_code == 0
    options = [name for param in get_command(cli.app).commands[command].params for name in param.opts]
    assert [name for name in options if name.startswith("--") and name not in done.output] == []
    assert "…" not in done.output


def test_every_option_of_a_script_is_readable_too(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["build_engines.py", "--help"])
    with pytest.raises(SystemExit):
        run("build_engines", build.main)
    shown = capsys.readouterr().out
    assert "--tp" in shown
    assert "…" not in shown
